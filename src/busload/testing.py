"""Test batched tasks without Redis and without torch. Also a pytest plugin, which installing busload enables.

``run_batch`` drives the function of a task directly. The fixture ``busload_worker`` runs a real worker on an
in-memory broker, so that a test sees batches form as they do in production. ``RecordedTask`` stands in for a
task that the code under test only sends to.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from celery import Celery
from celery.contrib.testing.worker import start_worker
from celery.worker import state

from .batching import Failed, match_results
from .tasks import BatchTask


def run_batch(task: BatchTask[Any, ..., Any], items: Sequence[Any], **options: Any) -> list[Any]:
    """Run ``items`` as one batch and return one value or exception per item, as their callers would get them.

    An option that the task names in ``per_item`` takes a list here, one value per item. Raises what the function
    raises, ResultCountError when its results do not match the items, TypeError when an item or option would be
    refused.
    """
    signature = task.call_signature
    for name in signature.per_item & set(options):
        if len(options[name]) != len(items):
            raise ValueError(f"{name} has {len(options[name])} values for {len(items)} items")
    for index, item in enumerate(items):
        own = {name: options[name][index] for name in signature.per_item if name in options}
        signature.check((item,), {**options, **own})
        signature.check_item(item)
    task.ensure_loaded(task.device or "cpu")
    omitted = {name: [signature.defaults.get(name)] * len(items) for name in signature.per_item - set(options)}
    results = task.batch_function(list(items), **omitted, **options)
    outcomes = match_results(results, len(items))
    return [outcome.error if isinstance(outcome, Failed) else outcome.value for outcome in outcomes]


@contextmanager
def in_memory_worker(app: Celery) -> Iterator[Any]:
    """Run a worker for ``app`` on a thread, with broker and results in this process's memory.

    The application's own broker and backend come back at the end.
    """
    settings = {
        "broker_url": "memory://",
        "result_backend": "cache+memory://",
        "broker_transport_options": {"polling_interval": 0.01},
    }
    before = {name: app.conf[name] for name in settings}
    reconnect(app, settings)
    try:
        with start_worker(app, pool="threads", concurrency=1, perform_ping_check=False) as worker:
            yield worker
            state.should_terminate = os.EX_OK
            # The loop looks twice more, each time waiting up to 2 s for a message; it need not wait.
            for _ in range(2):
                app.control.broadcast("ping")
    finally:
        reconnect(app, before)


def reconnect(app: Celery, settings: dict[str, Any]) -> None:
    app.conf.update(settings)
    # Connections and the backend are kept per application and made anew on the next use, as after a fork.
    app._after_fork()
    app._backend_cache = None
    app._local.__dict__.pop("backend", None)


@pytest.fixture
def busload_worker() -> Iterator[Callable[[Celery], Any]]:
    """Start workers on an in-memory broker: ``busload_worker(app)``; they stop with the test."""
    with ExitStack() as workers:
        yield lambda app: workers.enter_context(in_memory_worker(app))


@dataclass
class RecordedTask:
    """Stands in for a batched task where code only sends calls: records them and answers from ``results``.

    ``results`` maps an item to its result, None for other items; an exception instance is raised by ``get()``.
    """

    results: dict[Any, Any] = field(default_factory=dict)
    task: BatchTask[Any, ..., Any] | None = None
    """The task it stands in for: calls that this would refuse are refused."""
    calls: list[tuple[Any, dict[str, Any]]] = field(default_factory=list)

    def delay(self, item: Any, /, **options: Any) -> RecordedResult:
        """Record one call and return a handle with its result."""
        if self.task is not None:
            self.task.call_signature.check((item,), options)
            self.task.call_signature.check_item(item)
        self.calls.append((item, options))
        result = self.results.get(item) if isinstance(item, Hashable) else None
        return RecordedResult(f"recorded-{len(self.calls)}", result)

    def apply_async(self, args: Sequence[Any], kwargs: dict[str, Any] | None = None, **_: Any) -> RecordedResult:
        """Record one call as ``delay`` does, whatever its execution options."""
        (item,) = args
        return self.delay(item, **(kwargs or {}))


@dataclass(frozen=True)
class RecordedResult:
    """What ``RecordedTask.delay`` returns, with the part of AsyncResult that callers use."""

    id: str
    result: Any

    @property
    def state(self) -> str:
        return "FAILURE" if isinstance(self.result, BaseException) else "SUCCESS"

    def ready(self) -> bool:
        return True

    def get(self, timeout: float | None = None, propagate: bool = True) -> Any:
        """Return the result, or raise it if it is an exception and ``propagate`` is true."""
        if propagate and isinstance(self.result, BaseException):
            raise self.result
        return self.result
