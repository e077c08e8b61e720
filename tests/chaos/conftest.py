from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import redis
from celery import Celery

from busload.embedded import EmbeddedServer
from busload.tasks.leases import LeaseBook
from busload.testing import reconnect
from tests.chaos import chaos_app
from tests.support import DEADLINE_S, ROOT, environment, until


@dataclass(frozen=True)
class Worker:
    """A worker process and the name under which it holds leases."""

    pid: int
    incarnation: str

    def kill(self) -> None:
        """End it with SIGKILL and wait for that."""
        os.kill(self.pid, signal.SIGKILL)
        until(lambda: not Path(f"/proc/{self.pid}").exists())

    def is_alive(self) -> bool:
        return Path(f"/proc/{self.pid}").exists()


class Nursery:
    """Starts workers of ``tests.chaos.chaos_app`` in a tenth of the time that a process of its own would take."""

    def __init__(self, server: EmbeddedServer, log: Path) -> None:
        self.log = log
        self._workers: list[Worker] = []
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.chaos.nursery"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment(server),
            cwd=ROOT,
        )

    def start(self, name: str = "worker") -> Worker:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        incarnation = f"{name}/{uuid.uuid4().hex}"
        self._process.stdin.write(f"{incarnation} {name}@chaos {self.log}\n")
        self._process.stdin.flush()
        worker = Worker(int(self._process.stdout.readline()), incarnation)
        self._workers.append(worker)
        return worker

    def close(self) -> None:
        for worker in self._workers:
            if worker.is_alive():
                worker.kill()
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(DEADLINE_S)


class Load:
    """Sends numbers to be doubled, one after the other, until told to stop, and knows what was accepted."""

    def __init__(self, app: Celery, pause_s: float) -> None:
        self._app = app
        self._pause_s = pause_s
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._send, daemon=True)
        self.accepted: dict[str, int] = {}
        self.refused = 0

    def __enter__(self) -> Load:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stopped.set()
        self._thread.join(DEADLINE_S)

    def _send(self) -> None:
        number = 0
        with self._app.producer_pool.acquire() as producer:
            while not self._stopped.wait(self._pause_s):
                for _ in range(10):
                    task_id = str(uuid.uuid4())
                    try:
                        self._app.send_task("chaos.double", (number,), task_id=task_id, producer=producer, retry=False)
                        self.accepted[task_id] = number
                    except Exception:  # noqa: BLE001  the server is being killed: not accepted, or not known to be
                        self.refused += 1
                    number += 1

    def assert_all_are_right(self, client: redis.Redis, deadline_s: float = DEADLINE_S) -> None:
        """Every accepted call ends with the right result; say how many were run more than once."""
        waiting = dict(self.accepted)
        deadline = time.monotonic() + deadline_s
        while waiting:
            ids = list(waiting)
            for task_id, stored in zip(ids, client.mget([f"celery-task-meta-{one}" for one in ids]), strict=True):
                if stored is not None:
                    record = json.loads(stored)
                    assert (record["status"], record["result"]) == ("SUCCESS", 2 * waiting.pop(task_id))
            if waiting and time.monotonic() > deadline:
                raise AssertionError(f"{len(waiting)} of {len(self.accepted)} calls have no result")
            time.sleep(0.1)
        runs = [int(count) for count in client.hvals("runs")]
        print(
            f"{len(self.accepted)} calls, {sum(count > 1 for count in runs)} run more than once, {self.refused} refused"
        )


@pytest.fixture
def server() -> Iterator[EmbeddedServer]:
    """A server of the test's own, to break."""
    with EmbeddedServer() as server:
        yield server


@pytest.fixture
def app(server: EmbeddedServer) -> Celery:
    reconnect(chaos_app.app, {"broker_url": server.url, "result_backend": server.url})
    return chaos_app.app


@pytest.fixture
def client(server: EmbeddedServer) -> Iterator[redis.Redis]:
    with server.client() as client:
        yield client


@pytest.fixture
def book(client: redis.Redis) -> LeaseBook:
    return LeaseBook(client, "")


@pytest.fixture
def nursery(server: EmbeddedServer, tmp_path: Path) -> Iterator[Nursery]:
    nursery = Nursery(server, tmp_path / "workers.log")
    yield nursery
    nursery.close()
