"""Real servers and workers for tests. Everything started here is stopped by its process id."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from busload.embedded import EmbeddedServer
from busload.tasks.leases import LeaseBook

ROOT = Path(__file__).parent.parent
DEADLINE_S = 60.0

T = TypeVar("T")


def until(read: Callable[[], T], deadline_s: float = DEADLINE_S) -> T:
    """Return what ``read`` returns once it is true, or fail."""
    deadline = time.monotonic() + deadline_s
    while not (value := read()):
        if time.monotonic() > deadline:
            raise AssertionError(f"still {value!r} after {deadline_s:.0f} s")
        time.sleep(0.01)
    return value


def children_of(pid: int) -> set[int]:
    """Return the ids of all processes under ``pid``."""
    found: set[int] = set()
    parents = [pid]
    while parents:
        parent = parents.pop()
        for task in Path(f"/proc/{parent}/task").glob("*/children"):
            children = {int(child) for child in task.read_text().split()}
            found |= children
            parents += children
    return found


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def environment(server: EmbeddedServer, **more: str) -> dict[str, str]:
    """Return the environment of a process that uses ``server`` and imports busload and the tests."""
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    urls = {"BUSLOAD_BROKER_URL": server.url, "BUSLOAD_RESULT_BACKEND": server.url}
    return {**os.environ, **urls, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", **more}


class WorkerProcess:
    """``celery worker`` as a process of its own."""

    def __init__(self, app: str, log: Path, env: dict[str, str], options: tuple[str, ...]) -> None:
        self.log_path = log
        command = [sys.executable, "-m", "celery", "-A", app, "worker", "--loglevel", "INFO", *options]
        with log.open("w") as output:
            self.process = subprocess.Popen(command, env=env, stdout=output, stderr=subprocess.STDOUT, cwd=ROOT)

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def wait_until_ready(self) -> None:
        until(lambda: self.process.poll() is not None or " ready." in self.log)
        assert self.process.poll() is None, self.log

    def wait_for(self, text: str) -> None:
        until(lambda: text in self.log)

    def send(self, signum: signal.Signals) -> None:
        self.process.send_signal(signum)

    def stop(self, signum: signal.Signals = signal.SIGTERM) -> int:
        """Signal the worker and return its exit code."""
        self.send(signum)
        return self.process.wait(DEADLINE_S)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(DEADLINE_S)


@contextmanager
def worker_process(
    app: str, log: Path, env: dict[str, str], *options: str, pool: tuple[str, ...] = ("-P", "threads", "-c", "1")
) -> Iterator[WorkerProcess]:
    """Run a worker for the application in module ``app`` until the end of the block."""
    worker = WorkerProcess(app, log, env, (*pool, *options))
    try:
        yield worker
    finally:
        worker.close()


class Ledger:
    """What the batch functions of ``tests.integration.worker_app`` wrote down: every batch that they ran."""

    def __init__(self, server: EmbeddedServer) -> None:
        self._client = server.client()

    def batches(self) -> list[list[Any]]:
        """Return the items of each batch, in the order of their starts."""
        return [json.loads(batch) for batch in self._client.lrange("ledger", 0, -1)]

    def times_run(self, item: Any) -> int:
        return sum(batch.count(item) for batch in self.batches())


def queued(server: EmbeddedServer, queue: str = "celery") -> int:
    """Return how many messages wait in ``queue``."""
    with server.client() as client:
        return int(client.llen(queue))


def unacknowledged(server: EmbeddedServer) -> int:
    """Return how many messages are held by workers, busload's and stock ones."""
    with server.client() as client:
        held = sum(holder.messages for holder in LeaseBook(client, "").holders())
        return held + int(client.hlen("unacked"))


def is_drained(server: EmbeddedServer) -> bool:
    """Whether no message waits anywhere."""
    return queued(server) == 0 and unacknowledged(server) == 0
