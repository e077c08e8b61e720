"""Storing results in one call with the end of their leases, on a real server."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import redis
from celery import Celery

from busload import BatchTask, configure
from busload.batching import Succeeded
from busload.embedded import EmbeddedServer
from busload.tasks.leases import LeaseBook
from busload.workers.leases import Leases
from busload.workers.request import Call
from busload.workers.results import ResultEncoder
from busload.workers.store import OneCallStore, Refused, is_one_server


class Bench:
    """A worker's store, with calls that it holds."""

    def __init__(self, server: EmbeddedServer, client: redis.Redis, database: int = 0) -> None:
        backend = server.url.replace("virtual_host=0", f"virtual_host={database}")
        self.app = configure(Celery("store", broker=server.url, backend=backend, set_as_current=False))

        @self.app.task(base=BatchTask, name="store.echo", shared=False)
        def echo(items: list[Any], /) -> list[Any]:
            return items

        self.task = echo
        self.client = client
        self.leases = Leases(client, "", "w1")
        self.encoder = ResultEncoder(self.app.backend)
        self.store = OneCallStore(self.app.backend, self.encoder, self.leases)

    def call(self, name: str) -> Call:
        self.client.lpush("q", name)
        _, _, messages = self.leases.move(["q"], at_most=1, seen_drained=-1, full_depth=1)
        request: Any = SimpleNamespace(_context=None)
        return Call(name, self.task, [tag for tag, _ in messages], {}, lambda: request)

    def settle(self, *settled: tuple[Call, Any]) -> list[Any]:
        return self.store.store(self.encoder.encode([(call, Succeeded(value)) for call, value in settled]))

    def result(self, name: str) -> Any:
        return self.app.backend.get_task_meta(name, cache=False)["result"]


@pytest.mark.parametrize("database", [0, 5])
def test_results_are_stored_and_leases_end_in_one_call(
    server: EmbeddedServer, client: redis.Redis, database: int
) -> None:
    bench = Bench(server, client, database)
    assert is_one_server(bench.app.backend, client)
    calls = [bench.call(name) for name in "abc"]
    client.config_resetstat()
    assert bench.settle(*[(call, call.id * 2) for call in calls]) == [True] * 3
    stats = client.info("commandstats")
    assert sum(stats[name]["calls"] for name in ("cmdstat_evalsha", "cmdstat_eval") if name in stats) <= 2
    assert [bench.result(name) for name in "abc"] == ["aa", "bb", "cc"]
    assert client.hlen("busload:1:unacked:w1") == 0
    assert bench.leases.tags == set()
    assert client.keys("celery-task-meta-*") == ([] if database else client.keys("celery-task-meta-*"))


def test_results_expire_and_are_published(server: EmbeddedServer, client: redis.Redis) -> None:
    bench = Bench(server, client)
    with client.pubsub() as subscription:
        subscription.subscribe("celery-task-meta-a")
        bench.settle((bench.call("a"), "x"))
        while (message := subscription.get_message(timeout=5)) and message["type"] != "message":
            pass
    assert json.loads(message["data"])["result"] == "x"
    assert 0 < client.ttl("celery-task-meta-a") <= 3600


def test_a_call_that_others_have_is_not_settled(server: EmbeddedServer, client: redis.Redis) -> None:
    bench = Bench(server, client)
    lost = bench.call("lost")
    LeaseBook(client, "").take_back("w1")
    client.rename("q", "taken by others")
    kept = bench.call("kept")
    assert bench.settle((lost, "mine"), (kept, "mine")) == [False, True]
    assert client.get("celery-task-meta-lost") is None
    assert client.lrange("taken by others", 0, -1) == [b"lost"]


def test_a_settle_whose_reply_was_lost_counts_when_it_is_tried_again(
    server: EmbeddedServer, client: redis.Redis
) -> None:
    bench = Bench(server, client)
    call = bench.call("a")
    assert bench.settle((call, 1)) == [True]
    assert bench.settle((call, 1)) == [True]


@pytest.mark.parametrize("state", ["SUCCESS", "FAILURE", "REVOKED"])
def test_a_final_state_stays_final(server: EmbeddedServer, client: redis.Redis, state: str) -> None:
    bench = Bench(server, client)
    stored = json.dumps({"status": state, "result": "theirs"})
    client.set("celery-task-meta-a", stored)
    assert bench.settle((bench.call("a"), "mine")) == [True]
    assert client.get("celery-task-meta-a") == stored.encode()
    assert client.hlen("busload:1:unacked:w1") == 0


@pytest.mark.parametrize("stored", ['{"status": "STARTED"}', "no json", "[]"])
def test_what_is_not_final_is_overwritten(server: EmbeddedServer, client: redis.Redis, stored: str) -> None:
    bench = Bench(server, client)
    client.set("celery-task-meta-a", stored)
    assert bench.settle((bench.call("a"), "mine")) == [True]
    assert bench.result("a") == "mine"


def test_a_result_that_the_server_refuses_fails_alone(server: EmbeddedServer, client: redis.Redis) -> None:
    bench = Bench(server, client)
    client.lpush("celery-task-meta-b", "a list, to which a result cannot be written")
    calls = [bench.call(name) for name in "abc"]
    client.config_set("proto-max-bulk-len", str(1024 * 1024))
    try:
        verdicts = bench.settle((calls[0], 1), (calls[1], "x" * 2_000_000), (calls[2], 3))
    finally:
        client.config_set("proto-max-bulk-len", str(512 * 1024 * 1024))
    assert verdicts[0] is verdicts[2] is True
    assert isinstance(verdicts[1], Refused)
    assert client.hlen("busload:1:unacked:w1") == 1  # kept until its failure is stored


def test_large_results_travel_in_calls_of_their_own(server: EmbeddedServer, client: redis.Redis) -> None:
    bench = Bench(server, client)
    calls = [bench.call(f"call {number}") for number in range(8)]
    client.config_resetstat()
    assert bench.settle(*[(call, "x" * 700_000) for call in calls]) == [True] * 8
    assert client.info("commandstats")["cmdstat_evalsha"]["calls"] >= 8


def test_two_servers_are_told_apart(server: EmbeddedServer) -> None:
    with EmbeddedServer() as other, other.client() as client:
        app = Celery(broker=other.url, backend=server.url, set_as_current=False)
        assert not is_one_server(app.backend, client)
