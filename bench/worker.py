"""A worker under measurement: started, ready, idle, and watched until its messages are answered."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from celery import Celery

from ..batching import BusloadError
from ..embedded import EmbeddedServer
from ..supervisor import Child, Command, Supervisor
from .cpu import CpuClock, children_of
from .messages import Answers

START_TIMEOUT_S = 60.0
STALL_S = 30.0
POLL_S = 0.02
# A worker that does nothing uses less than this share of a core.
_IDLE_SHARE = 0.02


class BenchFailed(BusloadError):
    """A worker did not do its work, or did it wrong."""


class Stalled(BenchFailed):
    """A worker runs, but stores no more results."""


@dataclass(frozen=True)
class Program:
    """How to start a worker: a Python with Celery in it, an application, and options of ``celery worker``."""

    python: str
    app: str
    options: tuple[str, ...]
    environment: Mapping[str, str]
    folder: Path | None = None
    """Where the application is imported from, when it is not in a package of that Python."""


@dataclass(frozen=True)
class Worker:
    """A running worker. Its CPU time is that of its pool's processes as well."""

    child: Child
    cpu: CpuClock

    def wait_for(self, answers: Answers) -> int:
        """Return when the last message is answered: how many commands it took to find out.

        Raises BenchFailed when the worker ends, Stalled when nothing is stored for half a minute.
        """
        polls, size, grew_at = 0, -1, time.monotonic()
        while not answers.has_last():
            polls += 1
            if self.child.poll() is not None:
                raise BenchFailed(str(self.child.death()))
            if polls % 50 == 0:
                previous, size = size, answers.client.dbsize()
                grew_at = time.monotonic() if size != previous else grew_at
                polls += 1
            if time.monotonic() > grew_at + STALL_S:
                raise Stalled(f"no result in {STALL_S:.0f} s\n{self.child.log_tail()}")
            time.sleep(POLL_S)
        return polls + 1

    def wait_until_idle(self) -> None:
        """Return when the worker has nothing to do. Raises BenchFailed when it always has."""
        _until(lambda: _is_idle(self.cpu), self.child)


@contextmanager
def running_worker(server: EmbeddedServer, program: Program) -> Iterator[Worker]:
    """Start a worker on ``server`` and yield it when it is ready and has nothing to do; stop it afterwards."""
    urls = {"BUSLOAD_BROKER_URL": server.url, "BUSLOAD_RESULT_BACKEND": server.url}
    environment = {**urls, **program.environment}
    if program.folder is not None:
        environment["PYTHONPATH"] = ""
    # Mingling is a second of waiting at the start, for neighbours that are not there.
    celery = (program.python, "-m", "celery", "-A", program.app, "worker", "-l", "WARNING", "--without-mingle")
    with tempfile.TemporaryDirectory(prefix="busload-bench-") as logs, Supervisor(Path(logs)) as supervisor:
        child = supervisor.start(Command("worker", (*celery, *program.options), environment, program.folder))
        with Celery(broker=server.url, set_as_current=False) as app:
            _until(lambda: bool(app.control.ping(timeout=0.2)), child)
        worker = Worker(child, CpuClock(child.pid, *children_of(child.pid)))
        worker.wait_until_idle()
        yield worker


def _is_idle(cpu: CpuClock, during_s: float = 0.2) -> bool:
    before_s = cpu.seconds()
    time.sleep(during_s)
    return cpu.seconds() - before_s < _IDLE_SHARE * during_s


def _until(is_so: Callable[[], bool], child: Child) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while not is_so():
        if child.poll() is not None:
            raise BenchFailed(str(child.death()))
        if time.monotonic() > deadline:
            raise BenchFailed(f"the worker is not ready and idle after {START_TIMEOUT_S:.0f} s\n{child.log_tail()}")
