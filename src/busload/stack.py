"""Everything on one machine: an embedded server, workers, the API and Flower, as supervised children."""

from __future__ import annotations

import http.client
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from celery import Celery

from .batching import BusloadError
from .embedded import EmbeddedServer, free_port
from .supervisor import ChildDeath, Command, Supervisor

Progress = Callable[[str], None]

START_TIMEOUT_S = 120.0
_POLL_S = 0.1
_WORKER_GRACE_S = 40.0  # longer than that of its processes
# They start together on a new server: there is nothing that neighbours could tell.
_WORKER_OPTIONS = ("-l", "INFO", "--give-up-after", "3", "-o", "--without-mingle", "-o", "--without-gossip")


class StackError(BusloadError):
    """A part of the stack did not come up, or died."""


@dataclass(frozen=True)
class Stack:
    """A running stack."""

    app: Celery
    """Connected to the embedded server, to send tasks and to ask the workers."""
    api_url: str
    flower_url: str
    supervisor: Supervisor

    def wait(self, timeout_s: float | None = None) -> ChildDeath | None:
        """Wait until a part dies and return its death; None after ``timeout_s`` seconds."""
        return self.supervisor.wait(timeout_s)


@contextmanager
def running_stack(
    app_module: str,
    progress: Progress,
    data_dir: Path | None = None,
    api_port: int = 0,
    flower_port: int = 0,
    workers: int = 1,
) -> Iterator[Stack]:
    """Start everything for the Celery application in ``app_module``; stop it at the end of the block.

    ``workers`` processes run under one ``busload worker``. Ports of 0 are chosen among the free ones. ``data_dir``
    keeps the server's data; without it they are gone at the end. All children end when this process ends, however it
    ends. Raises StackError with the log's end when a part does not come up.
    """
    api_port, flower_port = api_port or free_port(), flower_port or free_port()
    with ExitStack() as parts:
        log_dir = Path(parts.enter_context(tempfile.TemporaryDirectory(prefix="busload-logs-")))
        began_at = time.monotonic()
        server = parts.enter_context(EmbeddedServer(data_dir))
        progress(f"server   {server.url}")
        environment = {
            "BUSLOAD_BROKER_URL": server.url,
            "BUSLOAD_RESULT_BACKEND": server.url,
            # Celery prefers these to the application's own.
            "CELERY_BROKER_URL": server.url,
            "CELERY_RESULT_BACKEND": server.url,
            "FLOWER_UNAUTHENTICATED_API": "true",
            "PYTHONUNBUFFERED": "1",
        }
        supervisor = parts.enter_context(Supervisor(log_dir))
        supervisor.adopt(server.child)
        busload = (sys.executable, "-m", "busload.cli")
        celery = (sys.executable, "-m", "celery", "-A", app_module)
        supervisor.start_together(
            [
                Command(
                    "worker",
                    (*busload, "worker", "-A", app_module, "--processes", str(workers), *_WORKER_OPTIONS),
                    environment,
                    grace_s=_WORKER_GRACE_S,
                ),
                Command("api", (*busload, "api", "--port", str(api_port), "--workers", "1"), environment),
                Command("flower", (*celery, "flower", "--address=127.0.0.1", f"--port={flower_port}"), environment),
            ]
        )
        app = Celery("busload-stack", broker=server.url, backend=server.url)
        stack = Stack(app, f"http://127.0.0.1:{api_port}", f"http://127.0.0.1:{flower_port}", supervisor)
        _wait_for(stack, "api", lambda: _answers(f"{stack.api_url}/healthz"))
        progress(f"api      {stack.api_url}")
        _wait_for(stack, "flower", lambda: _answers(f"{stack.flower_url}/healthcheck"))
        progress(f"flower   {stack.flower_url}")
        _wait_for(stack, "worker", lambda: len(app.control.ping(timeout=0.3, limit=workers)) == workers)
        progress(f"{'worker ' if workers == 1 else 'workers'}  ready after {time.monotonic() - began_at:.1f} s")
        yield stack


def _wait_for(stack: Stack, name: str, is_up: Callable[[], bool]) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while not is_up():
        if death := stack.wait(timeout_s=_POLL_S):
            raise StackError(str(death))
        if time.monotonic() > deadline:
            raise StackError(f"{name} did not answer within {START_TIMEOUT_S:.0f} s")


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=1.0) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, http.client.HTTPException, OSError):
        return False
