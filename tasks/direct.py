"""How a call made in this process reaches its result: recomputed here, by the runner, or already known."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ..batching import Failed, Outcome

if TYPE_CHECKING:
    from .task import BatchTask

DirectCall = Callable[["BatchTask[Any, ..., Any]", Any, dict[str, Any]], Any]


class _Thread(threading.local):
    known: tuple[str, Outcome] | None = None


_thread = _Thread()
_worker_call: list[DirectCall] = []


@contextmanager
def known_outcome(task_id: str, outcome: Outcome) -> Iterator[None]:
    """Let the call ``task_id`` that this thread makes inside the block end in ``outcome`` without running.

    This is how Celery's own tracer settles an item of a batch: it calls the task and is told the result.
    """
    _thread.known = (task_id, outcome)
    try:
        yield
    finally:
        _thread.known = None


def known_outcome_of(task_id: str | None) -> Outcome | None:
    """Return the outcome that this thread knows of the call ``task_id``."""
    if _thread.known is None or _thread.known[0] != task_id:
        return None
    return _thread.known[1]


def unwrap(outcome: Outcome) -> Any:
    """Return the value of ``outcome``, or raise its error."""
    if isinstance(outcome, Failed):
        raise outcome.error.with_traceback(outcome.origin)
    return outcome.value


@contextmanager
def calls_go_through(worker_call: DirectCall) -> Iterator[None]:
    """Send direct calls of batched tasks in this process to a worker's runner, inside the block."""
    _worker_call.append(worker_call)
    try:
        yield
    finally:
        _worker_call.remove(worker_call)


def worker_call() -> DirectCall | None:
    """Return the way to this process's runner, None outside a worker."""
    return _worker_call[-1] if _worker_call else None
