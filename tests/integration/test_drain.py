"""Whole batches fetched in one call, by kombu's own keys."""

from __future__ import annotations

import json
from typing import Any

import pytest
from celery import Celery

from busload.embedded import EmbeddedServer
from busload.testing import reconnect
from tests.integration import worker_app
from tests.integration.conftest import StartWorker
from tests.integration.worker_app import echo
from tests.support import Ledger, is_drained, queued, unacknowledged, until


def hold(start_worker: StartWorker, ledger: Ledger, **settings: Any) -> None:
    """Start a worker that is busy for a while, so that what it fetches stays held."""
    start_worker(settings=settings)
    echo.delay("busy", nap_s=3.0)
    until(lambda: ledger.times_run("busy") == 1)


@pytest.mark.usefixtures("app")
def test_a_worker_holds_no_more_than_its_prefetch(
    start_worker: StartWorker, server: EmbeddedServer, ledger: Ledger
) -> None:
    hold(start_worker, ledger)
    for number in range(300):
        echo.delay(number)
    until(lambda: unacknowledged(server) == 128)
    assert queued(server) == 301 - 128
    until(lambda: is_drained(server))
    assert sorted(item for batch in ledger.batches()[1:] for item in batch) == list(range(300))


@pytest.mark.usefixtures("app")
def test_what_is_held_is_kept_as_kombu_keeps_it(
    start_worker: StartWorker, server: EmbeddedServer, ledger: Ledger
) -> None:
    hold(start_worker, ledger)
    sent = [echo.delay(f"{number} “ünicode” \\ / \U0001f68c") for number in range(20)]
    until(lambda: unacknowledged(server) == 21)
    with server.client() as client:
        kept = [json.loads(value) for value in client.hvals("unacked")]
        assert client.zcard("unacked_index") == 21
    assert {message["headers"]["id"] for message, _, _ in kept} >= {result.id for result in sent}
    assert {(exchange, routing_key) for _, exchange, routing_key in kept} == {("", "celery")}
    assert [result.get(timeout=30) for result in sent] == [f"{n} “ünicode” \\ / \U0001f68c" for n in range(20)]


@pytest.mark.usefixtures("app")
def test_urgent_calls_come_first(start_worker: StartWorker, ledger: Ledger) -> None:
    for number in range(100):
        echo.apply_async((f"late {number}",), priority=9)
    for number in range(10):
        echo.apply_async((f"urgent {number}",), priority=0)
    start_worker()
    until(lambda: len(ledger.batches()) == 2)
    assert set(ledger.batches()[0]) >= {f"urgent {number}" for number in range(10)}


def test_a_prefix_is_before_every_key(start_worker: StartWorker, server: EmbeddedServer, ledger: Ledger) -> None:
    settings = {"broker_transport_options": {"global_keyprefix": "team:"}}
    reconnect(worker_app.app, {"broker_url": server.url, "result_backend": server.url, **settings})
    try:
        sent = [echo.delay(number) for number in range(200)]
        start_worker(settings=settings)
        assert [result.get(timeout=30) for result in sent] == list(range(200))
        with server.client() as client:
            until(lambda: client.hlen("team:unacked") == 0 and client.llen("team:celery") == 0)
            assert client.exists("unacked", "unacked_index", "celery") == 0
    finally:
        reconnect(worker_app.app, {"broker_transport_options": {}})


@pytest.mark.parametrize(
    "text", ["", "no json", "[]", "{}", '{"properties": 5}', '{"properties": {"delivery_tag": 5}}']
)
def test_what_is_no_message_does_not_stop_the_script(server: EmbeddedServer, text: str) -> None:
    from busload.workers.drain import _MOVE

    with server.client() as client:
        client.rpush("celery", text)
        assert client.eval(_MOVE, 3, "unacked", "unacked_index", "celery", 10, 10**6, 0) == []
        assert client.lrange("celery", 0, -1) == [text.encode()]


def test_one_call_moves_no_more_than_its_bytes(app: Celery, server: EmbeddedServer) -> None:
    from busload.workers.drain import _MOVE

    for number in range(10):
        app.send_task("echo", (str(number) * 1000,))
    with server.client() as client:
        moved = client.eval(_MOVE, 3, "unacked", "unacked_index", "celery", 10, 5000, 0)
        assert 2 <= len(moved) <= 5
        assert client.llen("celery") == 10 - len(moved) == 10 - client.hlen("unacked")
