"""``busload bench overhead``: what a task costs beside its own work, in stock Celery, celery-batches and busload.

An echo task whose results are stored, a backlog that is there before the worker sees it, one server, and the peers
taking turns. CPU time is that of the worker's process and of the server's, from the first message to the last result
and the acknowledgements that follow it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import redis

from ..embedded import EmbeddedServer
from .cpu import CpuClock
from .messages import Answers, Messages, Template
from .peers import BUSLOAD, Peer
from .worker import BenchFailed, running_worker

_STAGED = "bench:staged"
# After the last result, while acknowledgements and events are sent; a worker that waits costs nothing.
_AFTERMATH_S = 0.05


@dataclass(frozen=True)
class Round:
    """What one peer did with one backlog. CPU in microseconds per task."""

    tasks_per_s: float
    worker_us: float
    server_us: float
    server_commands: float
    """Per task; those inside scripts and transactions count as well."""


@dataclass(frozen=True)
class Spread:
    """The median of a peer's rounds, the least and the most."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(statistics.median(values), min(values), max(values))


@dataclass(frozen=True)
class Row:
    """A peer's rounds."""

    peer: str
    events: bool
    tasks_per_s: Spread
    worker_us: Spread
    server_us: Spread
    server_commands: Spread
    times_busload: float
    """Its worker's CPU time against busload's, medians of the same run."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


Results = dict[tuple[Peer, bool], list[Round]]


def measure(progress: Callable[[str], None], peers: Sequence[Peer], tasks: int, rounds: int) -> list[Row]:
    """Return a row for every peer, without events and with them; ``BUSLOAD`` must be among them.

    ``tasks`` is the backlog of the slow ones. Raises BenchFailed when a peer leaves a task without its result.
    """
    results: Results = {(peer, events): [] for events in (False, True) for peer in peers}
    with EmbeddedServer() as server:
        for number in range(rounds):
            for peer, events in results:
                one = _run(server, peer, events, tasks * peer.scale)
                results[peer, events].append(one)
                label = f"{peer.name}, events {'on' if events else 'off'}"
                progress(f"round {number + 1}: {label}: {one.worker_us:.0f} µs a task")
    return list(rows(results))


def rows(results: Results) -> Iterator[Row]:
    """Yield what the rounds of each peer come to."""
    for (peer, events), rounds in results.items():
        worker_us = Spread.of([one.worker_us for one in rounds])
        ours = statistics.median(one.worker_us for one in results[BUSLOAD, events])
        yield Row(
            peer=peer.name,
            events=events,
            tasks_per_s=Spread.of([one.tasks_per_s for one in rounds]),
            worker_us=worker_us,
            server_us=Spread.of([one.server_us for one in rounds]),
            server_commands=Spread.of([one.server_commands for one in rounds]),
            times_busload=worker_us.median / ours,
        )


def _run(server: EmbeddedServer, peer: Peer, events: bool, tasks: int) -> Round:
    with server.client() as client:
        client.flushall()
        messages = Messages.new(Template.of(server, peer.task, peer.queue))
        messages.push(client, _STAGED, tasks)
        answers = Answers(client, messages, tasks)
        server_cpu = CpuClock(server.pid)
        with running_worker(server, peer.program(events)) as worker:
            commands, server_s, worker_s = _commands(client), server_cpu.seconds(), worker.cpu.seconds()
            began_at = time.monotonic()
            client.rename(_STAGED, peer.queue)
            own = worker.wait_for(answers)
            took_s = time.monotonic() - began_at
            time.sleep(_AFTERMATH_S)
            worker_s, server_s = worker.cpu.seconds() - worker_s, server_cpu.seconds() - server_s
            commands = _commands(client) - commands - own
            if wrong := answers.wrong():
                raise BenchFailed(f"{peer.name} left {wrong} of {tasks} tasks without their result")
            if left := client.llen(peer.queue):
                raise BenchFailed(f"{peer.name} left {left} messages on its queue")
    return Round(tasks / took_s, worker_s / tasks * 1e6, server_s / tasks * 1e6, commands / tasks)


def _commands(client: redis.Redis) -> int:
    """Return how many commands the server has carried out."""
    return sum(command["calls"] for command in client.info("commandstats").values())
