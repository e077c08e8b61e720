"""Faults that were found by attacking a worker, each kept as the kind that it is."""

from __future__ import annotations

import json
import uuid
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import pytest
from celery import Celery
from kombu import Exchange, Queue

from busload import BatchTask, ResultEncodeError
from busload.batching import BatchAborted
from busload.embedded import EmbeddedServer
from busload.testing import reconnect
from tests.integration import worker_app
from tests.integration.conftest import APP, StartWorker
from tests.integration.test_batches import outcome
from tests.integration.worker_app import (
    boom,
    echo,
    ignores,
    large,
    missing_key,
    note_error,
    options_seen,
    plain_echo,
    small_batches,
    timeouts,
)
from tests.support import Ledger, environment, is_drained, queued, unacknowledged, until, worker_process


@pytest.mark.usefixtures("app")
@pytest.mark.parametrize("task", [missing_key, timeouts])
def test_an_error_of_the_users_is_never_taken_for_a_lost_connection(
    start_worker: StartWorker, server: EmbeddedServer, ledger: Ledger, task: BatchTask[Any, ..., Any]
) -> None:
    start_worker()
    failed = task.apply_async(("a",), link_error=note_error.s())
    assert isinstance(outcome(failed), (KeyError, TimeoutError))
    assert outcome(echo.delay("after")) == "after"
    until(lambda: is_drained(server))
    assert ledger.times_run(f"error of {failed.id}") == 1


@pytest.mark.usefixtures("app")
def test_a_result_that_the_server_refuses_fails_alone(start_worker: StartWorker, server: EmbeddedServer) -> None:
    with server.client() as client:
        limit = client.config_get("proto-max-bulk-len")["proto-max-bulk-len"]
        client.config_set("proto-max-bulk-len", "1mb")
        try:
            small, too_large = large.delay(10), large.delay(2_000_000)
            start_worker()
            assert outcome(small) == "x" * 10
            assert isinstance(outcome(too_large), ResultEncodeError)
            assert outcome(echo.delay("after")) == "after"
        finally:
            client.config_set("proto-max-bulk-len", limit)


def test_without_a_result_backend_calls_run_and_are_delivered_again(
    server: EmbeddedServer, start_worker: StartWorker, ledger: Ledger
) -> None:
    reconnect(worker_app.app, {"broker_url": server.url, "result_backend": server.url})
    client = Celery(broker=server.url, set_as_current=False)
    start_worker(settings={"busload_shutdown_grace_s": 0.1})
    client.send_task("echo", ("running",), {"nap_s": 60.0})
    until(lambda: ledger.times_run("running") == 1)
    with server.client() as redis_client:
        redis_client.rpush("celery", *[_redelivered(client, server, number) for number in range(10)])
    worker = start_worker(settings={"result_backend": None})
    until(lambda: sum(len(batch) for batch in ledger.batches()) >= 11)
    assert worker.process.poll() is None


def _redelivered(client: Celery, server: EmbeddedServer, number: int) -> str:
    client.send_task("echo", (number,), queue="made")
    with server.client() as redis_client:
        message = json.loads(redis_client.lpop("made"))
    message["properties"]["delivery_info"].update(redelivered=True, routing_key="celery")
    return json.dumps(message)


@pytest.mark.usefixtures("app")
def test_full_batches_of_another_task_hold_nothing_back(start_worker: StartWorker, ledger: Ledger) -> None:
    start_worker()
    for number in range(400):
        if number == 100:
            lone = echo.delay("lone")
        small_batches.delay(number)
    assert outcome(lone) == "lone"
    assert len(ledger.batches()) < 50


@pytest.mark.usefixtures("app")
def test_options_are_shared_by_equal_values_of_equal_types_alone(start_worker: StartWorker) -> None:
    moment = datetime(2026, 1, 1, tzinfo=UTC)
    options = [float("inf"), None, moment, moment.isoformat(), b"abc", "YWJj", Decimal("1.5"), "1.5", 1, 1.0, True]
    results = [options_seen.delay(number, option=option) for number, option in enumerate(options)]
    surrogate = options_seen.delay(99, option="\ud800")
    start_worker()
    assert [outcome(result) for result in results] == [repr(option) for option in options]
    assert outcome(surrogate) == repr("\ud800")


@pytest.mark.usefixtures("app")
def test_an_omitted_option_is_its_default(start_worker: StartWorker, ledger: Ledger) -> None:
    results = [options_seen.delay(1), options_seen.delay(2, option=None)]
    start_worker()
    assert [outcome(result) for result in results] == ["None", "None"]
    assert ledger.batches() == [[1, 2]]


@pytest.mark.usefixtures("app")
@pytest.mark.parametrize("link", [None, plain_echo.s()])
def test_celerys_own_signals_for_one_message_fail_the_call(start_worker: StartWorker, link: Any) -> None:
    start_worker()
    failed = ignores.apply_async(("a",), link=link)
    error = outcome(failed)
    assert isinstance(error, BatchAborted)
    assert "Ignore" in str(error)


@pytest.mark.usefixtures("app")
def test_traced_failures_of_one_batch_have_one_traceback_each(start_worker: StartWorker) -> None:
    results = [boom.apply_async((f"item {number}",), link=plain_echo.s()) for number in range(20)]
    start_worker()
    for result in results:
        outcome(result)
    assert {result.traceback.count("in boom") for result in results} == {1}


@pytest.mark.usefixtures("app")
def test_a_stored_record_that_cannot_be_read_is_overwritten(start_worker: StartWorker, server: EmbeddedServer) -> None:
    ids = [str(uuid.uuid4()) for _ in range(2)]
    with server.client() as client:
        client.set(f"celery-task-meta-{ids[0]}", b"\xff\xfe")
        client.set(f"celery-task-meta-{ids[1]}", "{}")
    start_worker()
    results = [echo.apply_async((task_id,), task_id=task_id) for task_id in ids]
    until(lambda: is_drained(server))
    assert [outcome(result) for result in results] == ids


@pytest.mark.parametrize(
    "routes",
    [{"echo": {"exchange": "x", "routing_key": "k"}}, {"*": {"queue": "elsewhere"}}],
)
def test_routes_that_name_no_queue_stop_no_worker(start_worker: StartWorker, routes: Any) -> None:
    worker = start_worker(settings={"task_routes": routes})
    assert worker.stop() == 0


def test_a_worker_of_another_pool_gives_up_the_queue_of_batched_calls(server: EmbeddedServer, tmp_path: Any) -> None:
    queue = Queue("plainq", Exchange("x"), routing_key="plain.key")
    client = Celery(broker=server.url, set_as_current=False)
    client.conf.task_queues = [queue]
    settings = {"task_routes": {"*": {"queue": "celery"}}}
    env = environment(server, WORKER_APP_SETTINGS=json.dumps(settings), WORKER_APP_QUEUE="plainq x plain.key")
    with worker_process(APP, tmp_path / "log", env, "-Q", "plainq", pool=("-P", "prefork", "-c", "1")) as worker:
        worker.wait_until_ready()
        client.send_task("echo", (1,), exchange="x", routing_key="plain.key")
        worker.wait_for("Giving it up")
        until(lambda: queued(server, "plainq") == 1 and unacknowledged(server) == 0)
        assert worker.log.count("Giving it up") < 5


@pytest.mark.usefixtures("app")
def test_the_registry_may_be_full_when_a_worker_starts(start_worker: StartWorker, server: EmbeddedServer) -> None:
    with EmbeddedServer() as results, results.client() as client:
        client.config_set("maxmemory", "1")
        worker = start_worker(settings={"result_backend": results.url})
        assert "the API does not know this worker's tasks yet" in worker.log
        client.config_set("maxmemory", "0")
        until(lambda: client.hexists("busload:1:tasks", "echo"))


@pytest.mark.parametrize("ttl_s", [-5, 1.5, True])
def test_a_lifetime_is_checked_at_declaration(ttl_s: object) -> None:
    app = Celery("lifetimes", set_as_current=False)

    def echoes(items: list[str], /) -> list[str]:
        return items

    declare = app.task(base=BatchTask, name="ttl", shared=False, result_ttl_s=ttl_s)
    declare(echoes)
    with pytest.raises(ValueError, match="result_ttl_s must be a whole number"):
        app.finalize()


def test_loading_may_call_another_batched_task() -> None:
    app = Celery("nested", set_as_current=False)

    @app.task(base=BatchTask, name="inner", shared=False)
    def inner(items: list[str], /) -> list[str]:
        return [item.upper() for item in items]

    class Outer(BatchTask[str, ..., str]):
        name = "outer"

        def load(self, device: str) -> None:
            self.prefix = inner("warm")

        def run_batch(self, prepared: list[str]) -> list[str]:
            return [self.prefix + item for item in prepared]

    assert app.register_task(Outer())("x") == "WARMx"
