"""``busload bench overhead``: what a task costs beside its own work, in stock Celery and in busload.

An echo task whose results are stored, a backlog that is there before the worker sees it, one server, and the peers
taking turns. CPU time is that of the worker's process and of the server's, from the first message to the last
acknowledgement.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import redis
from celery import Celery

from ..batching import BusloadError
from ..embedded import EmbeddedServer
from ..supervisor import Command, Supervisor

APP = "busload.bench.overhead_app"
TIMEOUT_S = 120.0
_STAGED = "bench:staged"


@dataclass(frozen=True)
class Peer:
    """One way to run the echo task."""

    name: str
    task: str
    queue: str
    pool: tuple[str, ...]


PEERS = (
    Peer("celery solo", "bench.plain", "plain", ("-P", "solo")),
    Peer("celery threads", "bench.plain", "plain", ("-P", "threads", "-c", "1")),
    Peer("busload", "bench.batched", "batched", ("-P", "threads", "-c", "1")),
)


@dataclass(frozen=True)
class Round:
    """What one peer did with one backlog."""

    tasks_per_s: float
    worker_us: float
    server_us: float


@dataclass(frozen=True)
class Row:
    """A peer's rounds: medians, and the least and largest worker cost. CPU in microseconds per task."""

    peer: str
    events: bool
    tasks_per_s: float
    worker_us: float
    worker_us_spread: tuple[float, float]
    server_us: float
    times_busload: float

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class BenchFailed(BusloadError):
    """A worker did not finish its backlog."""


def measure(progress: Callable[[str], None], tasks: int, rounds: int) -> list[Row]:
    """Return a row for every peer, without events and with them.

    Raises BenchFailed when a backlog is not done within two minutes.
    """
    results: dict[tuple[Peer, bool], list[Round]] = {(peer, events): [] for events in (False, True) for peer in PEERS}
    with EmbeddedServer() as server:
        for number in range(rounds):
            for peer, events in results:
                one = _run(server, peer, events, tasks)
                results[peer, events].append(one)
                label = f"{peer.name}, events {'on' if events else 'off'}"
                progress(f"round {number + 1}: {label}: {one.worker_us:.0f} µs a task")
    return list(_rows(results))


def _rows(results: dict[tuple[Peer, bool], list[Round]]) -> Iterator[Row]:
    medians = {key: statistics.median(one.worker_us for one in rounds) for key, rounds in results.items()}
    ours = PEERS[-1]
    for (peer, events), rounds in results.items():
        costs = [one.worker_us for one in rounds]
        yield Row(
            peer=peer.name,
            events=events,
            tasks_per_s=statistics.median(one.tasks_per_s for one in rounds),
            worker_us=medians[peer, events],
            worker_us_spread=(min(costs), max(costs)),
            server_us=statistics.median(one.server_us for one in rounds),
            times_busload=medians[peer, events] / medians[ours, events],
        )


def _run(server: EmbeddedServer, peer: Peer, events: bool, tasks: int) -> Round:
    with server.client() as client, tempfile.TemporaryDirectory(prefix="busload-bench-") as logs:
        client.flushall()
        _send(server, peer, tasks)
        client.rename(peer.queue, _STAGED)
        environment = {
            "BUSLOAD_BROKER_URL": server.url,
            "BUSLOAD_RESULT_BACKEND": server.url,
            "BENCH_EVENTS": "on" if events else "off",
        }
        celery = (sys.executable, "-m", "celery", "-A", APP, "worker", "-l", "WARNING", "-Q", peer.queue)
        with Supervisor(Path(logs)) as supervisor:
            worker = supervisor.start(Command("worker", (*celery, *peer.pool), environment))
            client_app = Celery(broker=server.url, set_as_current=False)
            _wait(lambda: bool(client_app.control.ping(timeout=0.2)), worker.log_tail)
            worker_s, server_s, began_at = _cpu_s(worker.pid), _server_cpu_s(client), time.monotonic()
            client.rename(_STAGED, peer.queue)
            _wait(lambda: client.llen(peer.queue) == 0 and client.hlen("unacked") == 0, worker.log_tail)
            took_s = time.monotonic() - began_at
            worker_s, server_s = _cpu_s(worker.pid) - worker_s, _server_cpu_s(client) - server_s
        stored = sum(1 for _ in client.scan_iter("celery-task-meta-*", count=1000))
        if stored != tasks:
            raise BenchFailed(f"{peer.name} stored {stored} of {tasks} results")
    return Round(tasks / took_s, worker_s / tasks * 1e6, server_s / tasks * 1e6)


def _send(server: EmbeddedServer, peer: Peer, tasks: int) -> None:
    # Without a backend, or the client would subscribe to a channel for each result.
    app = Celery(broker=server.url, set_as_current=False)
    with app.producer_pool.acquire() as producer:
        for number in range(tasks):
            app.send_task(peer.task, (f"item {number}",), queue=peer.queue, producer=producer)


def _wait(is_done: Callable[[], bool], log_tail: Callable[[], str]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not is_done():
        if time.monotonic() > deadline:
            raise BenchFailed(f"not done after {TIMEOUT_S:.0f} s\n{log_tail()}")
        time.sleep(0.01)


def _cpu_s(pid: int) -> float:
    """Return the CPU time of a process, its threads included, in seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _server_cpu_s(client: redis.Redis) -> float:
    cpu = client.info("cpu")
    return float(cpu["used_cpu_user"]) + float(cpu["used_cpu_sys"])
