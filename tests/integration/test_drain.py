"""Whole batches drained from Redis by any number of workers, and what goes back."""

from __future__ import annotations

import json
import time
import uuid
from pathlib import Path
from typing import Any

import pytest
from celery import Celery

from busload.embedded import EmbeddedServer
from busload.tasks.leases import LeaseBook
from busload.testing import reconnect
from tests.integration import worker_app
from tests.integration.conftest import StartWorker
from tests.integration.worker_app import brief, echo, plain_echo, small_batches
from tests.support import Ledger, environment, is_drained, queued, unacknowledged, until, worker_process


@pytest.mark.usefixtures("app")
def test_a_busy_worker_leaves_what_waits_to_others(
    start_worker: StartWorker, server: EmbeddedServer, ledger: Ledger
) -> None:
    start_worker()
    for number in range(300):
        echo.delay(number)
    until(lambda: is_drained(server))
    busy = echo.delay("busy", nap_s=60.0)
    until(lambda: ledger.times_run("busy") == 1)
    sent = [echo.delay(f"waiting {number}") for number in range(64)]
    time.sleep(0.2)
    assert (queued(server), unacknowledged(server)) == (64, 1)
    start_worker()
    assert [result.get(timeout=30) for result in sent] == [f"waiting {number}" for number in range(64)]
    assert not busy.ready()


@pytest.mark.usefixtures("app")
def test_a_worker_holds_no_more_than_its_prefetch(
    start_worker: StartWorker, server: EmbeddedServer, ledger: Ledger
) -> None:
    for number in range(200):
        echo.delay(number, nap_s=0.5 + number / 1000)  # no two may ride together
    start_worker(settings={"worker_prefetch_multiplier": 70})
    until(lambda: len(ledger.batches()) == 2)
    assert 64 <= unacknowledged(server) <= 70


@pytest.mark.usefixtures("app")
def test_four_idle_workers_form_batches_as_full_as_one_would(
    start_worker: StartWorker, server: EmbeddedServer, ledger: Ledger
) -> None:
    for _ in range(4):
        start_worker()
    for number in range(4 * 64):
        small_batches.delay(number)
    until(lambda: is_drained(server))
    sizes = [len(batch) for batch in ledger.batches()]
    assert sum(sizes) == 256
    assert sum(size == 8 for size in sizes) >= 28


@pytest.mark.usefixtures("app")
def test_urgent_calls_come_first(start_worker: StartWorker, ledger: Ledger) -> None:
    for number in range(100):
        echo.apply_async((f"late {number}",), priority=9)
    for number in range(10):
        echo.apply_async((f"urgent {number}",), priority=0)
    start_worker()
    until(lambda: len(ledger.batches()) == 2)
    assert set(ledger.batches()[0]) >= {f"urgent {number}" for number in range(10)}


def test_a_prefix_is_before_every_key(start_worker: StartWorker, server: EmbeddedServer) -> None:
    options: dict[str, Any] = {"global_keyprefix": "team:"}
    settings = {"broker_transport_options": options, "result_backend_transport_options": options}
    reconnect(worker_app.app, {"broker_url": server.url, "result_backend": server.url, **settings})
    try:
        sent = [brief.delay(str(number)) for number in range(200)]
        worker = start_worker(settings=settings)
        assert [result.get(timeout=30) for result in sent] == [str(number) for number in range(200)]
        with server.client() as client:
            until(lambda: not any(holder.messages for holder in LeaseBook(client, "team:").holders()))
            ours = [key for key in client.scan_iter() if not key.startswith((b"team:", b"_kombu"))]
        assert ours == []
        assert worker.stop() == 0
    finally:
        reconnect(worker_app.app, {"broker_transport_options": {}, "result_backend_transport_options": {}})


@pytest.mark.usefixtures("app")
def test_plain_tasks_of_a_drained_queue_run_as_always(start_worker: StartWorker, server: EmbeddedServer) -> None:
    start_worker()
    plain = [plain_echo.delay(number) for number in range(20)]
    batched = [echo.delay(number) for number in range(20)]
    late = plain_echo.apply_async(("late",), countdown=0.5)
    assert [result.get(timeout=30) for result in plain + batched] == [*range(20), *range(20)]
    assert late.get(timeout=30) == "late"
    until(lambda: is_drained(server))


def test_stock_workers_and_their_unacknowledged_messages_are_left_alone(
    app: Celery, start_worker: StartWorker, server: EmbeddedServer
) -> None:
    with server.client() as client:
        client.hset("unacked", "tag", '[{"body": ""}, "", "celery"]')
        client.zadd("unacked_index", {"tag": time.time()})
        start_worker()
        assert echo.delay("ours").get(timeout=30) == "ours"
        assert client.hgetall("unacked") == {b"tag": b'[{"body": ""}, "", "celery"]'}
        assert client.zcard("unacked_index") == 1


@pytest.mark.parametrize("text", ["", "no json", "[]", "{}", '{"properties": 5}', '{"properties": {}, "body": "@"}'])
@pytest.mark.usefixtures("app")
def test_what_is_no_message_stops_nobody(start_worker: StartWorker, server: EmbeddedServer, text: str) -> None:
    with server.client() as client:
        client.rpush("celery", text)
    worker = start_worker()
    assert echo.delay("after").get(timeout=30) == "after"
    until(lambda: is_drained(server))
    assert worker.process.poll() is None
    assert "cannot be read" in worker.log or "unknown message" in worker.log


def test_a_user_with_few_rights_is_enough(tmp_path: Path) -> None:
    with EmbeddedServer(tcp=True) as server, server.client() as client:
        rights = ("~*", "&*", "+@all", "-@dangerous", "-@admin", "-client|tracking")
        client.execute_command("ACL", "SETUSER", "limited", "on", ">secret", *rights)
        url = server.url.replace("redis://", "redis://limited:secret@")
        reconnect(worker_app.app, {"broker_url": url, "result_backend": url})
        env = {**environment(server), "BUSLOAD_BROKER_URL": url}
        with worker_process("tests.integration.worker_app", tmp_path / "worker.log", env, "-n", "w1@test") as worker:
            worker.wait_until_ready()
            assert brief.delay("asked").get(timeout=30) == "asked"
            worker.wait_for("does not tell of new messages")
            assert "secret" not in worker.log
            assert worker.stop() == 0


@pytest.mark.usefixtures("app")
def test_stock_receive_can_be_chosen(start_worker: StartWorker, server: EmbeddedServer) -> None:
    start_worker(settings={"busload_receive": "stock"})
    sent = [echo.delay(number) for number in range(100)]
    assert [result.get(timeout=30) for result in sent] == list(range(100))
    until(lambda: is_drained(server))
    with server.client() as client:
        assert client.exists("busload:1:leases") == 0


def test_a_killed_workers_calls_are_swept_by_another(
    app: Celery, start_worker: StartWorker, server: EmbeddedServer, ledger: Ledger
) -> None:
    ids = [app.send_task("echo", (f"call {number}",), {"nap_s": 1.0}).id for number in range(100)]
    killed = start_worker()
    until(lambda: ledger.batches())
    killed.process.kill()
    held = unacknowledged(server)
    assert held >= 64
    start_worker()
    with server.client() as client:
        (holder,) = [one for one in LeaseBook(client, "").holders() if one.messages == held]
        client.zadd("busload:1:leases", {holder.incarnation: 1})  # as if fifteen seconds had passed
    for number, task_id in enumerate(ids):
        until(lambda task_id=task_id: app.backend.get_task_meta(task_id, cache=False)["status"] == "SUCCESS")  # type: ignore[misc]
        assert app.backend.get_task_meta(task_id)["result"] == f"call {number}"
    until(lambda: is_drained(server))


def test_copies_of_one_message_have_one_outcome(
    app: Celery, start_worker: StartWorker, server: EmbeddedServer, ledger: Ledger
) -> None:
    result = app.send_task("echo", ("copied",))
    with server.client() as client:
        (message,) = client.lrange("celery", 0, -1)
        for _ in range(9):
            copy = json.loads(message)
            copy["properties"]["delivery_tag"] = str(uuid.uuid4())
            client.lpush("celery", json.dumps(copy))
    start_worker()
    assert result.get(timeout=30) == "copied"
    until(lambda: is_drained(server))
    assert ledger.times_run("copied") == 1


@pytest.mark.usefixtures("app")
def test_a_workers_connections_do_not_grow_with_load(
    app: Celery, start_worker: StartWorker, server: EmbeddedServer
) -> None:
    with server.client() as client:
        before = {connection["id"] for connection in client.client_list()}
        start_worker()
        with app.connection_for_write() as connection, connection.channel() as channel:
            producer = app.amqp.Producer(channel)
            ids = {entry["id"] for entry in client.client_list() if entry["id"] not in before}
            for number in range(2000):
                app.send_task("brief", (str(number),), producer=producer)
            most = 0
            while not is_drained(server):
                most = max(most, sum(entry["id"] not in before for entry in client.client_list()))
        assert 0 < len(ids) <= most <= 16 + 4  # those of this test's own sending and looking
