"""The peers of ``busload bench overhead``: ways to run the same echo task."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path

from .worker import Program

_FOLDER = Path(__file__).resolve().parent
_APP = "busload.bench.overhead_app"
_THREADS = ("-P", "threads", "-c", "1")


@dataclass(frozen=True)
class Peer:
    """One way to run the echo task."""

    name: str
    task: str
    queue: str
    pool: tuple[str, ...]
    scale: int = 1
    """How many times longer its backlog is, so that the rounds of the fast last as well."""
    environment: dict[str, str] = field(default_factory=dict, hash=False)
    python: Path | None = None
    """That of another environment, which has no busload."""

    def program(self, events: bool) -> Program:
        """Return how its worker is started, with Celery's task events or without."""
        environment = {**self.environment, "BENCH_EVENTS": "on" if events else "off"}
        options = ("-Q", self.queue, *self.pool)
        if self.python is None:
            return Program(sys.executable, _APP, options, environment)
        return Program(str(self.python), "celery_batches_app", options, environment, _FOLDER)


SOLO = Peer("Celery, solo pool", "bench.plain", "plain", ("-P", "solo"))
THREADS = Peer("Celery, threads pool", "bench.plain", "plain", _THREADS)
STOCK_RECEIVE = Peer("busload, stock receive", "bench.batched", "batched", _THREADS, 5, {"BENCH_RECEIVE": "stock"})
BUSLOAD = Peer("busload", "bench.batched", "batched", _THREADS, 10, {"BENCH_RECEIVE": "drain"})


def celery_batches(python: Path) -> Peer:
    """Return the peer that runs in the environment of ``python``."""
    return Peer(
        "celery-batches 0.11", "bench.batches", "batches", ("-P", "prefork", "-c", "1"), python=python.absolute()
    )


def default_celery_batches() -> Path | None:
    """Return the Python of the environment that ``make bench`` sets up, where there is one."""
    python = _FOLDER.parent / ".venv-bench/bin/python"
    return python if python.exists() else None


def all_peers(celery_batches_python: Path | None) -> list[Peer]:
    """Return the peers in the order of a round; celery-batches where its Python is given."""
    others = [] if celery_batches_python is None else [celery_batches(celery_batches_python)]
    return [SOLO, THREADS, *others, STOCK_RECEIVE, BUSLOAD]
