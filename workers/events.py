"""What monitors are told of each call of a batch, in groups: Flower lists them like any task."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from celery.events import EventDispatcher
from celery.utils.saferepr import saferepr
from kombu.utils.encoding import safe_repr

from ..batching import Failed
from .decode import Headers
from .request import Call
from .settle import Settled

# Celery's dispatcher sends what it has gathered when so many events wait, or at the end of a turn of the loop.
EVENTS_PER_MESSAGE = 256


class Events:
    """Sends events of calls, on the consumer's thread. ``dispatcher()`` is the one of the moment."""

    def __init__(self, dispatcher: Callable[[], EventDispatcher | None]) -> None:
        self._dispatcher = dispatcher

    def received(self, calls: list[tuple[Call, Headers]]) -> None:
        """Tell of calls that came by the drain; Celery tells of those that it receives."""
        send = self._sender()
        if send is None:
            return
        for call, headers in calls:
            if call.task.send_events:
                send(
                    "task-received",
                    uuid=call.id,
                    name=headers.task,
                    args=headers.argsrepr,
                    kwargs=headers.kwargsrepr,
                    root_id=headers.root_id,
                    parent_id=headers.parent_id,
                    retries=headers.retries or 0,
                    eta=None,
                    expires=headers.expires,
                )

    def started(self, calls: list[Call]) -> None:
        send = self._sender()
        if send is None:
            return
        for call in calls:
            if call.task.send_events:
                send("task-started", uuid=call.id)

    def finished(self, settled: Settled, run_s: float) -> None:
        """Tell each call's outcome; ``run_s`` is what its batch took in the model, in seconds."""
        send = self._sender()
        if send is None:
            return
        for call, outcome in settled:
            if not call.task.send_events:
                continue
            if isinstance(outcome, Failed):
                exception = safe_repr(outcome.error)
                send("task-failed", uuid=call.id, exception=exception, traceback=outcome.traceback)
            else:
                result = saferepr(outcome.value, call.task.resultrepr_maxsize)
                send("task-succeeded", uuid=call.id, result=result, runtime=run_s)

    def flush(self) -> None:
        dispatcher = self._dispatcher()
        if dispatcher is not None:
            dispatcher.flush()

    def _sender(self) -> Callable[..., Any] | None:
        """Return what sends events; None when nobody wants those of tasks."""
        dispatcher = self._dispatcher()
        if dispatcher is None or not dispatcher.enabled or (dispatcher.groups and "task" not in dispatcher.groups):
            return None
        return dispatcher.send  # type: ignore[no-any-return]
