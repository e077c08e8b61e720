import json
import math
import sys
import uuid
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec
import pytest
import redis
from celery import Celery, states
from celery.backends.base import compress_payload
from celery.exceptions import TaskRevokedError
from flask.testing import FlaskClient
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import SecretStr

from busload.api import Settings, create_app, ids
from busload.api.gateway import LONGEST_WAIT_S
from busload.embedded import EmbeddedServer
from busload.tasks.registry import Registry

LONGEST_TTL_S = 60  # of the tasks that conftest publishes
NOW_MS = 1_764_500_000_000


class NeedsTwo(Exception):
    def __init__(self, first: int, second: int) -> None:
        super().__init__(first, second)


@pytest.fixture
def worker(server: EmbeddedServer) -> Celery:
    """The application of a worker, which writes records as Celery does."""
    return Celery(broker=server.url, backend=server.url, set_as_current=False)


def read(api: FlaskClient, task_id: str) -> dict[str, Any]:
    answer = api.get(f"/v1/results/{task_id}")
    assert answer.status_code == 200
    assert answer.content_type == "application/json"
    body = json.loads(answer.data, parse_constant=lambda constant: pytest.fail(f"{constant} is not JSON"))
    assert body["id"] == task_id
    assert isinstance(body, dict)
    return body


def assert_error(api: FlaskClient, task_id: str, status: int, code: str) -> None:
    answer = api.get(f"/v1/results/{task_id}")
    assert (answer.status_code, answer.json["error"]["code"]) == (status, code)


def test_a_thousand_ids_are_known_right_after_their_202(api: FlaskClient) -> None:
    for _ in range(1000):
        task_id = api.post("/v1/tasks/embed", json={"input": "a"}).json["id"]
        assert read(api, task_id) == {"id": task_id, "state": "PENDING", "result": None}


def test_ids_of_one_process_are_known_to_all(api: FlaskClient, server: EmbeddedServer) -> None:
    other = create_app(Settings(broker_url=SecretStr(server.url))).test_client()
    task_id = api.post("/v1/tasks/embed", json={"input": "a"}).json["id"]
    assert read(other, task_id)["state"] == "PENDING"


@pytest.mark.parametrize("task_id", ["nope", str(uuid.uuid4()), "x" * 128, "00000000-0000-8000-8000-000000000000"])
def test_ids_that_nobody_minted_are_404(api: FlaskClient, task_id: str) -> None:
    assert_error(api, task_id, 404, "unknown_id")


@pytest.mark.parametrize("task_id", ["x" * 129, "a b", "a.b", "ä", "%00", "a%0A", "{x}", "a:b"])
def test_what_cannot_be_an_id_is_400(api: FlaskClient, task_id: str) -> None:
    assert_error(api, task_id, 400, "invalid_id")


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.text())
def test_no_id_makes_a_server_error(api: FlaskClient, task_id: str) -> None:
    answer = api.get(f"/v1/results/{quote(task_id, safe='')}")
    assert answer.status_code in (400, 404)
    assert answer.is_json


def test_a_minted_id_lasts_as_long_as_the_longest_result(
    api: FlaskClient, worker: Celery, monkeypatch: pytest.MonkeyPatch
) -> None:
    task_id = ids.mint(Registry(worker.backend).id_key(), NOW_MS)
    longest_ms = 1000 * (LONGEST_TTL_S + LONGEST_WAIT_S)
    for age_ms, status in ((0, 200), (-5000, 200), (longest_ms, 200), (longest_ms + 1, 410)):
        monkeypatch.setattr("busload.api.gateway._now_ms", lambda age_ms=age_ms: NOW_MS + age_ms)
        assert api.get(f"/v1/results/{task_id}").status_code == status
    assert_error(api, task_id, 410, "expired")
    worker.backend.store_result(task_id, 5, states.SUCCESS)
    assert read(api, task_id)["result"] == 5


def test_a_minted_id_is_pending_for_ever_where_results_are_kept_for_ever(
    api: FlaskClient, worker: Celery, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = Registry(worker.backend)
    kept = next(iter(registry.all().values()))
    registry.publish([msgspec.structs.replace(kept, name="kept", result_ttl_s=0)])
    task_id = ids.mint(registry.id_key(), NOW_MS)
    monkeypatch.setattr("busload.api.gateway._now_ms", lambda: NOW_MS + 10**12)
    assert read(api, task_id)["state"] == "PENDING"


def test_an_id_of_python_is_404_until_redis_knows_it(api: FlaskClient, worker: Celery) -> None:
    task_id = worker.send_task("embed", ["a"], queue="gpu").id
    assert_error(api, task_id, 404, "unknown_id")
    worker.backend.store_result(task_id, [0.5], states.SUCCESS)
    assert read(api, task_id) == {"id": task_id, "state": "SUCCESS", "result": [0.5]}


@pytest.mark.parametrize(
    ("stored", "shown"), [("PENDING", "PENDING"), ("STARTED", "STARTED"), ("RETRY", "RETRY"), ("PROGRESS", "STARTED")]
)
def test_states_on_the_way(api: FlaskClient, worker: Celery, stored: str, shown: str) -> None:
    worker.backend.store_result("id", ValueError("x") if stored == "RETRY" else {"pid": 1}, stored)
    assert read(api, "id") == {"id": "id", "state": shown, "result": None}


@pytest.mark.parametrize("result", [None, 0, "text", [1.5, 2], {"b": 1, "a": [None, True]}, "\ud800", 10**40])
def test_results_come_back_as_stored(api: FlaskClient, worker: Celery, result: object) -> None:
    worker.backend.store_result("id", result, states.SUCCESS)
    assert read(api, "id") == {"id": "id", "state": "SUCCESS", "result": result}


def test_compressed_records_are_read(api: FlaskClient, worker: Celery, store: redis.Redis) -> None:
    record = json.dumps({"status": "SUCCESS", "result": "x" * 100})
    store.set("celery-task-meta-id", compress_payload(record, "gzip"))
    assert read(api, "id")["result"] == "x" * 100


def test_numbers_that_json_lacks_become_null_and_say_so(api: FlaskClient, worker: Celery) -> None:
    worker.backend.store_result("id", {"a": [1.0, math.nan, -math.inf]}, states.SUCCESS)
    assert read(api, "id") == {
        "id": "id",
        "state": "SUCCESS",
        "result": {"a": [1.0, None, None]},
        "non_finite": True,
    }


def test_types_of_kombus_json_become_strings(api: FlaskClient, worker: Celery) -> None:
    moment, name = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC), uuid.uuid4()
    worker.backend.store_result("id", [moment, name, Decimal("1.50"), b"\xff", moment.time()], states.SUCCESS)
    assert read(api, "id")["result"] == [moment.isoformat(), str(name), "1.50", "/w==", "03:04:05"]


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (ValueError("bad"), "ValueError", "bad"),
        (NeedsTwo(1, 2), "NeedsTwo", "1, 2"),
        (RuntimeError("x" * 1_000_000), "RuntimeError", "x" * 2000),
        (RuntimeError(), "RuntimeError", ""),
    ],
)
def test_a_failure_is_its_type_and_bounded_message(
    api: FlaskClient, worker: Celery, error: Exception, kind: str, message: str
) -> None:
    worker.backend.mark_as_failure("id", error, traceback="Traceback: secret")
    assert read(api, "id") == {
        "id": "id",
        "state": "FAILURE",
        "error": {"code": "task_failed", "type": kind, "message": message},
    }


def test_a_revoked_call_has_an_error_too(api: FlaskClient, worker: Celery) -> None:
    worker.backend.store_result("id", TaskRevokedError("revoked"), states.REVOKED)
    assert read(api, "id")["state"] == "REVOKED"
    assert read(api, "id")["error"] == {"code": "task_revoked", "type": "TaskRevokedError", "message": "revoked"}


def test_nothing_that_a_record_names_is_imported_or_called(
    api: FlaskClient, store: redis.Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hostile_module.py").write_text("raise SystemExit\n")
    monkeypatch.syspath_prepend(tmp_path)
    canary = tmp_path / "canary"
    for module, kind in (("hostile_module", "Boom"), ("os", "system"), ("pathlib", "Path.touch")):
        failure = {"exc_type": kind, "exc_message": [f"touch {canary}"], "exc_module": module}
        store.set("celery-task-meta-id", json.dumps({"status": "FAILURE", "result": failure, "traceback": None}))
        assert read(api, "id")["error"]["type"] == kind
    assert not canary.exists()
    assert "hostile_module" not in sys.modules


@pytest.mark.parametrize(
    "result",
    [None, 5, "text", [], {}, {"exc_type": None}, {"exc_type": {"a": 1}, "exc_message": {"b": math.nan}}],
)
def test_failures_of_any_shape_are_read(api: FlaskClient, store: redis.Redis, result: object) -> None:
    store.set("celery-task-meta-id", json.dumps({"status": "FAILURE", "result": result}))
    body = read(api, "id")
    assert body["state"] == "FAILURE"
    assert body["error"]["code"] == "task_failed"


@pytest.mark.parametrize(
    "record",
    [
        b"",
        b"not json",
        b"\xff\xfe",
        b"null",
        b"[]",
        b"5",
        b"{}",
        b'{"status": "SUCCESS"}',
        b'{"status": [], "result": 1}',
        b'{"status": "SUCCESS", "result": {"__type__": "unknown", "__value__": 1}}',
        b'{"status": "SUCCESS", "result": {"__type__": "uuid", "__value__": 1}}',
        b'{"status": "SUCCESS", "result": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"status": "SUCCESS", "result": ' + b"[" * 900 + b"NaN" + b"]" * 900 + b"}",
        b"\x00celery-compressed\x00application/x-gzip\x00broken",
        b"\x00celery-compressed\x00application/unknown\x00broken",
        b"\x80\x04cposix\nsystem\n.",
    ],
    ids=lambda record: repr(record[:60]),
)
def test_a_broken_record_is_an_answer_too(api: FlaskClient, store: redis.Redis, record: bytes) -> None:
    store.set("celery-task-meta-id", record)
    body = read(api, "id")
    assert body["state"] == "FAILURE"
    assert body["error"]["code"] == "result_unreadable"
