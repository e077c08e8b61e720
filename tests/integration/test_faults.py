"""Connections and servers come and go; calls keep their one right outcome."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from celery import Celery
from celery.result import AsyncResult
from kombu.exceptions import OperationalError

from busload.embedded import EmbeddedServer
from tests.integration.conftest import StartWorker
from tests.support import Ledger, is_drained, until

CALLS = 150


@pytest.fixture
def server() -> Iterator[EmbeddedServer]:
    """A server of the test's own, to break."""
    with EmbeddedServer() as server:
        yield server


def send(app: Celery, name: str) -> list[AsyncResult[str]]:
    # Without a subscription for each result: these tests cut every connection.
    return [app.send_task("echo", (f"{name} {number}",), {"nap_s": 0.2}) for number in range(CALLS)]


def all_succeed(app: Celery, ids: list[str], name: str) -> None:
    for number, task_id in enumerate(ids):
        until(lambda task_id=task_id: app.backend.get_task_meta(task_id, cache=False)["status"] == "SUCCESS")  # type: ignore[misc]
        assert app.backend.get_task_meta(task_id)["result"] == f"{name} {number}"


def test_cut_connections_lose_nothing(
    app: Celery, start_worker: StartWorker, server: EmbeddedServer, ledger: Ledger
) -> None:
    worker = start_worker()
    ids = [result.id for result in send(app, "before")]
    until(lambda: ledger.batches())
    with server.client() as client:
        for _ in range(3):
            client.client_kill_filter(_type="normal", skipme=True)
            client.client_kill_filter(_type="pubsub", skipme=True)
    ids_after = [result.id for result in send(app, "after")]
    all_succeed(app, ids, "before")
    all_succeed(app, ids_after, "after")
    assert worker.process.poll() is None
    until(lambda: is_drained(server))


def test_a_server_that_restarts_during_a_batch_loses_nothing(
    app: Celery, start_worker: StartWorker, server: EmbeddedServer, ledger: Ledger
) -> None:
    worker = start_worker()
    ids = [result.id for result in send(app, "call")]
    until(lambda: ledger.batches())
    with server.client() as client:
        client.config_set("appendfsync", "always")
    server.kill()
    server.restart()
    all_succeed(app, ids, "call")
    assert worker.process.poll() is None
    until(lambda: is_drained(server))


def test_a_full_server_still_drains_and_settles(app: Celery, start_worker: StartWorker, server: EmbeddedServer) -> None:
    worker = start_worker()
    ids = [app.send_task("tracked", (f"call {number}",), {"nap_s": 0.3}).id for number in range(CALLS)]
    with server.client() as client:
        client.config_set("maxmemory", "1")
        with pytest.raises(OperationalError, match="used memory"):
            app.send_task("tracked", ("refused",), retry=False)
        all_succeed(app, ids, "call")
        until(lambda: is_drained(server))
        client.config_set("maxmemory", "0")
    assert worker.process.poll() is None
