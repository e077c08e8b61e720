"""Workers, connections and servers are killed under load; every accepted call ends with its right result."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Callable

import pytest
import redis
from celery import Celery

from busload.embedded import EmbeddedServer
from busload.tasks.leases import LEASE_S, RENEW_S, LeaseBook
from tests.chaos.conftest import Load, Nursery, Worker
from tests.support import is_drained, until

KILLS = 100


def holds_any(book: LeaseBook, worker: Worker) -> bool:
    return any(holder.incarnation == worker.incarnation and holder.messages for holder in book.holders())


@pytest.mark.timeout(240)
def test_a_hundred_kills_lose_nothing(app: Celery, nursery: Nursery, book: LeaseBook, client: redis.Redis) -> None:
    """Two workers at a time; the one that holds calls is killed, and its supervisor names it dead, as a rule."""
    chance = random.Random(7)
    workers = [nursery.start("one"), nursery.start("two")]
    held_at_kill = 0
    with Load(app, pause_s=0.02) as load:
        for number in range(KILLS):
            victim = workers.pop(0)
            until(lambda victim=victim: holds_any(book, victim))  # type: ignore[misc]
            time.sleep(chance.uniform(0, 0.02))
            victim.kill()
            if number % 10:
                held_at_kill += book.take_back(victim.incarnation)
            workers.append(nursery.start(f"w{number}"))
    load.assert_all_are_right(client)
    until(lambda: not sum(holder.messages for holder in book.holders()))
    assert held_at_kill > KILLS


def test_a_server_that_is_killed_and_restarted_loses_nothing(
    app: Celery, nursery: Nursery, server: EmbeddedServer, client: redis.Redis
) -> None:
    workers = [nursery.start("one"), nursery.start("two")]
    with Load(app, pause_s=0.02) as load:
        for _ in range(3):
            before = len(load.accepted)
            until(lambda before=before: len(load.accepted) > before + 300)  # type: ignore[misc]
            server.kill()
            server.restart()
    load.assert_all_are_right(client)
    assert all(worker.is_alive() for worker in workers)
    until(lambda: is_drained(server))


def cut_connections_three_times_in_three_seconds(server: EmbeddedServer) -> None:
    with server.client() as client:
        for kind in ("normal", "normal", "pubsub"):
            client.client_kill_filter(_type=kind, skipme=True)
            time.sleep(1.0)


def freeze_the_server_for_five_seconds(server: EmbeddedServer) -> None:
    server.pause()
    time.sleep(5.0)
    server.resume()


@pytest.mark.parametrize("disturb", [cut_connections_three_times_in_three_seconds, freeze_the_server_for_five_seconds])
def test_a_worker_goes_on_after(
    app: Celery,
    nursery: Nursery,
    server: EmbeddedServer,
    client: redis.Redis,
    disturb: Callable[[EmbeddedServer], None],
) -> None:
    worker = nursery.start()
    with Load(app, pause_s=0.02) as load:
        until(lambda: client.hlen("runs") > 100)
        disturb(server)
    load.assert_all_are_right(client)
    assert worker.is_alive()
    until(lambda: is_drained(server))


def test_a_frozen_worker_loses_its_lease_and_overwrites_nothing(
    app: Celery, nursery: Nursery, server: EmbeddedServer, book: LeaseBook, client: redis.Redis
) -> None:
    """SIGSTOP in the middle of a batch for longer than the lease; another worker does the work; then SIGCONT."""
    frozen = nursery.start("frozen")
    ids = [app.send_task("chaos.double", (number,), {"nap_s": 1.0}).id for number in range(20)]
    until(lambda: client.hlen("runs") == 20)
    os.kill(frozen.pid, signal.SIGSTOP)
    other = nursery.start("other")
    until(lambda: all(client.hget("runs", str(number)) == b"2" for number in range(20)), LEASE_S + 4 * RENEW_S)
    until(lambda: all(client.mget([f"celery-task-meta-{one}" for one in ids])))
    stored = client.mget([f"celery-task-meta-{one}" for one in ids])
    os.kill(frozen.pid, signal.SIGCONT)
    until(lambda: "no longer ours" in nursery.log.read_text())
    assert client.mget([f"celery-task-meta-{one}" for one in ids]) == stored
    assert [json.loads(record)["result"] for record in stored if record] == [2 * number for number in range(20)]
    # It goes on, with what it takes now.
    other.kill()
    assert app.send_task("chaos.double", (100,)).get(timeout=30) == 200
    assert frozen.is_alive()
    assert all(client.hget("runs", str(number)) == b"2" for number in range(20))


def test_callbacks_are_sent_however_workers_die(
    app: Celery, nursery: Nursery, book: LeaseBook, client: redis.Redis
) -> None:
    callback = app.signature("chaos.note", immutable=False)
    for number in range(400):
        app.send_task("chaos.linked", (number,), link=callback)
    chance = random.Random(11)
    worker = nursery.start()
    for _ in range(8):
        until(lambda worker=worker: holds_any(book, worker))  # type: ignore[misc]
        time.sleep(chance.uniform(0, 0.1))
        worker.kill()
        book.take_back(worker.incarnation)
        worker = nursery.start()
    until(lambda: client.hlen("notes") == 400)


@pytest.mark.timeout(150)
def test_sigterm_in_a_long_batch(app: Celery, nursery: Nursery, server: EmbeddedServer, client: redis.Redis) -> None:
    """A batch that outlasts the lease is finished by the worker that stops, and run once."""
    worker = nursery.start()
    result = app.send_task("chaos.double", (21,), {"nap_s": 20.0})
    until(lambda: client.hget("runs", "21"))
    os.kill(worker.pid, signal.SIGTERM)
    nursery.start("other")
    until(lambda: not worker.is_alive())
    assert result.get(timeout=30) == 42
    assert client.hget("runs", "21") == b"1"
    until(lambda: is_drained(server))
