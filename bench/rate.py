"""``busload bench rate``: how long calls take, and how busy the model is, at a given rate of calls.

The load is open: a generator in a process of its own sends on schedule and waits for nobody, and the latency of a
call runs from the moment it was due until its result was stored. Both moments are told by the same clock, and
nothing listens meanwhile: a result expires a set time after the server stored it, so its expiry says when that was.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import redis

from ..embedded import EmbeddedServer
from .cpu import CpuClock, resident_mib
from .generator import Schedule, Sent
from .messages import Answers, Messages, Template
from .rate_app import RESULT_TTL_S
from .worker import BenchFailed, Program, Stalled, Worker, running_worker

TASK, QUEUE = "bench.model", "model"
_STAGED = "bench:staged"
_WARM_UP = 256
_GENERATOR = (sys.executable, "-m", "busload.bench.generator")


@dataclass(frozen=True)
class Load:
    """Calls that come at a rate, or without one: all of them before the worker begins."""

    tasks: int
    rate: float | None = None

    def __str__(self) -> str:
        return f"backlog of {self.tasks}" if self.rate is None else f"{self.rate:g}/s"


@dataclass(frozen=True)
class Run:
    """One call of the model, on the monotonic clock."""

    began_at: float
    ended_at: float
    items: int


@dataclass(frozen=True)
class Model:
    """What the model did from the first task to the last."""

    mean_batch: float
    gap_ms: float
    """From the end of one call to the start of the next, the median."""
    busy: float
    """The share of the time spent in calls."""


@dataclass(frozen=True)
class Row:
    """How one load was borne. CPU in cores, from the first task to the last result."""

    load: str
    tasks: int
    achieved_per_s: float
    p50_ms: float | None
    p99_ms: float | None
    p999_ms: float | None
    model: Model
    worker_cpu: float
    server_cpu: float
    worker_mib: tuple[float, float]
    """Resident before and after."""
    latest_sent_ms: float
    """How much later than due the generator sent a task, at worst; it is part of that task's latency."""
    left_on_queue: int
    unanswered: int

    @property
    def is_complete(self) -> bool:
        return not self.left_on_queue and not self.unanswered

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def measure(
    progress: Callable[[str], None], loads: Iterable[Load], receive: str, *, events: bool = False
) -> Iterator[Row]:
    """Yield a row for each load, each borne by a new worker on the same server.

    ``receive`` is the worker's ``busload_receive``. Raises BenchFailed when a worker ends, or answers nothing.
    """
    with EmbeddedServer() as server:
        for load in loads:
            progress(f"{load}: {load.tasks} tasks")
            yield _bear(server, load, receive, events)


def _bear(server: EmbeddedServer, load: Load, receive: str, events: bool) -> Row:
    with tempfile.TemporaryDirectory(prefix="busload-bench-") as folder, server.client() as client:
        client.flushall()
        runs_path = Path(folder) / "runs.json"
        program = Program(
            sys.executable,
            "busload.bench.rate_app",
            ("-Q", QUEUE, "-P", "threads", "-c", "1"),
            {"BENCH_RECEIVE": receive, "BENCH_RUNS": str(runs_path), "BENCH_EVENTS": "on" if events else "off"},
        )
        messages = Messages.new(Template.of(server, TASK, QUEUE))
        answers = Answers(client, messages, load.tasks)
        if load.rate is None:
            messages.push(client, _STAGED, load.tasks)
        server_cpu = CpuClock(server.pid)
        with running_worker(server, program) as worker:
            _warm_up(client, worker, messages.template)
            mib = resident_mib(worker.child.pid)
            worker_s, server_s = worker.cpu.seconds(), server_cpu.seconds()
            sent = _send(server, client, messages, load)
            with suppress(Stalled):  # the row tells what is left
                worker.wait_for(answers)
            worker_s, server_s = worker.cpu.seconds() - worker_s, server_cpu.seconds() - server_s
            unanswered = answers.wrong()
            left_on_queue = client.llen(QUEUE)
            mibs = (mib, resident_mib(worker.child.pid))
        stored_at = dict(answers.stored_at(RESULT_TTL_S))
        runs = [Run(*run) for run in json.loads(runs_path.read_text())]
    if not stored_at:
        raise BenchFailed(f"{load}: no task was answered")
    took_s = max(stored_at.values()) - sent.began_at
    p50, p99, p999 = _latencies_ms(stored_at, sent.began_at, load.rate) if load.rate else (None, None, None)
    return Row(
        load=str(load),
        tasks=load.tasks,
        achieved_per_s=len(stored_at) / took_s,
        p50_ms=p50,
        p99_ms=p99,
        p999_ms=p999,
        model=summarize([run for run in runs if run.began_at >= sent.began_at_monotonic]),
        worker_cpu=worker_s / took_s,
        server_cpu=server_s / took_s,
        worker_mib=mibs,
        latest_sent_ms=sent.latest_ms,
        left_on_queue=left_on_queue,
        unanswered=unanswered,
    )


def _warm_up(client: redis.Redis, worker: Worker, template: Template) -> None:
    """Let the worker do a few batches before anything is counted."""
    messages = Messages.new(template)
    messages.push(client, QUEUE, _WARM_UP)
    worker.wait_for(Answers(client, messages, _WARM_UP))
    worker.wait_until_idle()


def _send(server: EmbeddedServer, client: redis.Redis, messages: Messages, load: Load) -> Sent:
    """Return when all tasks are sent."""
    if load.rate is None:
        sent = Sent(time.time(), time.monotonic(), 0.0)
        client.rename(_STAGED, QUEUE)
        return sent
    schedule = Schedule(str(server.socket_path), QUEUE, messages, load.tasks, load.rate)
    done = subprocess.run(_GENERATOR, input=schedule.to_json(), capture_output=True, text=True, check=False)
    if done.returncode:
        raise BenchFailed(f"the generator ended with exit code {done.returncode}:\n{done.stderr}")
    return Sent(**json.loads(done.stdout))


def summarize(runs: Sequence[Run]) -> Model:
    """Return what the runs of the model, two at least, come to."""
    gaps = [after.began_at - before.ended_at for before, after in pairwise(runs)]
    return Model(
        mean_batch=statistics.fmean(run.items for run in runs),
        gap_ms=statistics.median(gaps) * 1000,
        busy=sum(run.ended_at - run.began_at for run in runs) / (runs[-1].ended_at - runs[0].began_at),
    )


def percentile(ordered: Sequence[float], share: float) -> float:
    """Return the least of ``ordered`` that is not below ``share`` of them."""
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def _latencies_ms(stored_at: dict[int, float], began_at: float, rate: float) -> tuple[float, float, float]:
    latencies = sorted((at - began_at - number / rate) * 1000 for number, at in stored_at.items())
    return percentile(latencies, 0.5), percentile(latencies, 0.99), percentile(latencies, 0.999)
