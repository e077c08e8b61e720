from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from celery import Celery

from busload.embedded import EmbeddedServer
from busload.testing import reconnect
from tests.integration import worker_app
from tests.support import Ledger, WorkerProcess, environment, worker_process

APP = "tests.integration.worker_app"

StartWorker = Callable[..., WorkerProcess]


@pytest.fixture(scope="session")
def session_server() -> Iterator[EmbeddedServer]:
    with EmbeddedServer() as server:
        yield server


@pytest.fixture
def server(session_server: EmbeddedServer) -> EmbeddedServer:
    with session_server.client() as client:
        client.flushall()
    return session_server


@pytest.fixture
def app(server: EmbeddedServer) -> Celery:
    """The tests' application as a client of the server."""
    reconnect(worker_app.app, {"broker_url": server.url, "result_backend": server.url})
    return worker_app.app


@pytest.fixture
def ledger(server: EmbeddedServer) -> Ledger:
    return Ledger(server)


@pytest.fixture
def start_worker(server: EmbeddedServer, tmp_path: Path) -> Iterator[StartWorker]:
    """Start workers that end with the test: ``start_worker(*options, settings={...})``, ready when it returns."""
    with ExitStack() as workers:
        count = 0

        def start(*options: str, settings: dict[str, Any] | None = None, ready: bool = True) -> WorkerProcess:
            nonlocal count
            count += 1
            env = environment(server, WORKER_APP_SETTINGS=json.dumps(settings or {}))
            log = tmp_path / f"worker{count}.log"
            worker = workers.enter_context(worker_process(APP, log, env, "-n", f"w{count}@test", *options))
            if ready:
                worker.wait_until_ready()
            return worker

        yield start
