"""What monitors are told of each call of a batch, in groups: Flower lists them like any task."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from celery.events import EventDispatcher
from celery.utils.saferepr import saferepr
from kombu.utils.encoding import safe_repr

from ..batching import Failed
from .request import Call
from .settle import Settled

# Celery's dispatcher sends what it has gathered when so many events wait, or at the end of a turn of the loop.
EVENTS_PER_MESSAGE = 256


class Events:
    """Sends events of calls, on the consumer's thread. ``dispatcher()`` is the one of the moment."""

    def __init__(self, dispatcher: Callable[[], EventDispatcher | None]) -> None:
        self._dispatcher = dispatcher

    def started(self, calls: list[Call]) -> None:
        for call in calls:
            self._send(call, "task-started")

    def finished(self, settled: Settled, run_s: float) -> None:
        """Tell each call's outcome; ``run_s`` is what its batch took in the model, in seconds."""
        for call, outcome in settled:
            if isinstance(outcome, Failed):
                self._send(call, "task-failed", exception=safe_repr(outcome.error), traceback=outcome.traceback)
            else:
                result = saferepr(outcome.value, call.task.resultrepr_maxsize)
                self._send(call, "task-succeeded", result=result, runtime=run_s)

    def flush(self) -> None:
        dispatcher = self._dispatcher()
        if dispatcher is not None:
            dispatcher.flush()

    def _send(self, call: Call, kind: str, **fields: Any) -> None:
        dispatcher = self._dispatcher()
        if dispatcher is not None and dispatcher.enabled and call.task.send_events:
            dispatcher.send(kind, uuid=call.id, **fields)
