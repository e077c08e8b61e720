"""A Sentinel makes a replica the master under load."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from busload.embedded import EmbeddedServer, _server_binary, free_port
from busload.supervisor import Child, Command
from busload.testing import reconnect
from tests.chaos import chaos_app
from tests.support import environment, until, worker_process

CALLS = 400


class Replica(EmbeddedServer):
    """A server that follows another."""

    def __init__(self, master: EmbeddedServer) -> None:
        super().__init__(tcp=True)
        self._master_port = master.port

    def _options(self) -> list[str]:
        return [*super()._options(), "--replicaof", f"127.0.0.1 {self._master_port}"]


@dataclass(frozen=True)
class Group:
    """A master, its replica, and the Sentinel that watches them."""

    master: EmbeddedServer
    replica: EmbeddedServer
    sentinel_port: int


@pytest.fixture
def group(tmp_path: Path) -> Iterator[Group]:
    with ExitStack() as parts:
        master = parts.enter_context(EmbeddedServer(tcp=True))
        replica = parts.enter_context(Replica(master))
        port = free_port()
        config = tmp_path / "sentinel.conf"
        config.write_text(
            f"port {port}\nbind 127.0.0.1\ndir {tmp_path}\n"
            f"sentinel monitor group 127.0.0.1 {master.port} 1\n"
            "sentinel down-after-milliseconds group 1000\nsentinel failover-timeout group 5000\n"
        )
        sentinel = Child(
            Command("sentinel", [str(_server_binary()), str(config), "--sentinel"]), tmp_path / "sentinel.log"
        )
        sentinel.start()
        parts.callback(sentinel.stop)
        until(lambda: "+slave slave" in (tmp_path / "sentinel.log").read_text())
        yield Group(master, replica, port)


def test_a_failover_loses_nothing_that_the_replica_has(group: Group, tmp_path: Path) -> None:
    url = f"sentinel://127.0.0.1:{group.sentinel_port}/0"
    options = {"master_name": "group"}
    settings = {
        "broker_url": url,
        "result_backend": url,
        "broker_transport_options": options,
        "result_backend_transport_options": options,
    }
    reconnect(chaos_app.app, settings)
    ids = [chaos_app.app.send_task("chaos.linked", (n,), {"nap_s": 0.3}).id for n in range(CALLS)]
    with group.master.client() as master:
        assert master.wait(1, 10_000) == 1
    env = environment(group.master, CHAOS_SETTINGS=json.dumps(settings))
    with (
        group.replica.client() as replica,
        worker_process(chaos_app.__name__, tmp_path / "worker.log", env, "-n", "w1@chaos") as worker,
    ):
        until(lambda: len(replica.keys("celery-task-meta-*")) >= 64)
        group.master.kill()
        until(lambda: all(replica.mget([f"celery-task-meta-{one}" for one in ids])))
        for number, record in enumerate(replica.mget([f"celery-task-meta-{one}" for one in ids])):
            assert json.loads(record or b"{}")["result"] == 2 * number
        until(lambda: replica.llen("celery") == 0)
        assert worker.process.poll() is None
    reconnect(chaos_app.app, {"broker_transport_options": {}, "result_backend_transport_options": {}})
