"""Being told of messages without taking any, on a real server."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
import redis

from busload.embedded import EmbeddedServer
from busload.workers.doorbell import Doorbell

QUEUES = [["a", "a\x06\x163"], ["b"]]
LONG_S = 30.0


@pytest.fixture
def doorbell(server: EmbeddedServer) -> Iterator[Doorbell]:
    with server.client() as client:
        doorbell = Doorbell(client)
        yield doorbell
        doorbell.close()


def rings(doorbell: Doorbell, timeout_s: float) -> bool:
    began_at = time.monotonic()
    doorbell.wait(timeout_s, for_messages=True)
    return time.monotonic() - began_at < timeout_s


def test_a_look_tells_depth_and_drained_count_of_each_queue(client: redis.Redis, doorbell: Doorbell) -> None:
    client.lpush("a", "1", "2")
    client.lpush("a\x06\x163", "3")
    client.hset("drained", "a", 7)
    client.hset("drained", "b", 5)
    assert doorbell.look("drained", QUEUES) == [(3, 7), (0, 5)]


@pytest.mark.parametrize("key", ["a", "a\x06\x163", "b"])
def test_a_message_in_any_list_rings(client: redis.Redis, doorbell: Doorbell, key: str) -> None:
    doorbell.look("drained", QUEUES)
    threading.Timer(0.05, client.lpush, (key, "x")).start()
    assert rings(doorbell, LONG_S)


def test_a_message_that_comes_before_the_wait_rings(client: redis.Redis, doorbell: Doorbell) -> None:
    doorbell.look("drained", QUEUES)
    client.lpush("b", "x")
    assert rings(doorbell, LONG_S)


def test_nothing_rings_after_a_look_that_saw_it(client: redis.Redis, doorbell: Doorbell) -> None:
    doorbell.look("drained", QUEUES)
    client.lpush("b", "x")
    time.sleep(0.05)
    assert doorbell.look("drained", QUEUES) == [(0, 0), (1, 0)]
    assert not rings(doorbell, 0.1)


def test_another_thread_ends_a_wait(doorbell: Doorbell) -> None:
    doorbell.look("drained", QUEUES)
    for for_messages in (True, False):
        threading.Timer(0.05, doorbell.wake).start()
        began_at = time.monotonic()
        doorbell.wait(LONG_S, for_messages=for_messages)
        assert time.monotonic() - began_at < LONG_S


def test_a_wake_before_the_wait_counts(doorbell: Doorbell) -> None:
    doorbell.look("drained", QUEUES)
    doorbell.wake()
    assert rings(doorbell, LONG_S)
    assert not rings(doorbell, 0.1)


def test_a_cut_connection_is_made_anew_by_the_next_look(client: redis.Redis, doorbell: Doorbell) -> None:
    doorbell.look("drained", QUEUES)
    client.client_kill_filter(_type="normal", skipme=True)
    with pytest.raises(redis.ConnectionError):
        doorbell.look("drained", QUEUES)
    client.lpush("b", "x")
    assert doorbell.look("drained", QUEUES) == [(0, 0), (1, 0)]
    threading.Timer(0.05, client.lpush, ("b", "x")).start()
    assert rings(doorbell, LONG_S)


def test_a_server_that_does_not_tell_is_asked_soon(server: EmbeddedServer) -> None:
    with redis.Redis(unix_socket_path=str(server.socket_path), protocol=2) as client:
        doorbell = Doorbell(client)
        doorbell.look("drained", QUEUES)
        assert rings(doorbell, LONG_S)
        doorbell.close()
