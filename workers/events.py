"""What monitors are told of each call of a batch, many in one message: Flower lists them like any task."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import msgspec
from celery.events import EventDispatcher
from celery.utils.log import get_logger
from celery.utils.saferepr import saferepr
from celery.utils.time import utcoffset
from kombu.utils.encoding import safe_repr

from ..batching import Failed
from .decode import Headers
from .request import Call
from .settle import Settled

logger = get_logger(__name__)

# Celery's dispatcher sends what it has gathered when so many events wait, or at the end of a turn of the loop.
EVENTS_PER_MESSAGE = 1024

_GROUP = "task"
_ROUTING_KEY = "task.multi"
_SHORT = frozenset((int, float, bool, type(None)))
_SHOWN = 16

Event = dict[str, Any]


class Events:
    """Gathers events of calls and sends them, on the consumer's thread. ``dispatcher()`` is that of the moment."""

    def __init__(self, dispatcher: Callable[[], EventDispatcher | None]) -> None:
        self._dispatcher = dispatcher
        self._gathered: list[Event] = []

    def received(self, calls: list[tuple[Call, Headers]]) -> None:
        """Tell of calls that came by the drain; Celery tells of those that it receives."""
        self._gather(
            "task-received",
            (
                {
                    "uuid": call.id,
                    "name": headers.task,
                    "args": headers.argsrepr,
                    "kwargs": headers.kwargsrepr,
                    "root_id": headers.root_id,
                    "parent_id": headers.parent_id,
                    "retries": headers.retries or 0,
                    "eta": None,
                    "expires": headers.expires,
                }
                for call, headers in calls
                if call.task.send_events
            ),
        )

    def started(self, calls: list[Call]) -> None:
        self._gather("task-started", ({"uuid": call.id} for call in calls if call.task.send_events))

    def finished(self, settled: Settled, run_s: float) -> None:
        """Tell each call's outcome; ``run_s`` is what its batch took in the model, in seconds."""
        told = [(call, outcome) for call, outcome in settled if call.task.send_events]
        self._gather(
            "task-failed",
            (
                {"uuid": call.id, "exception": safe_repr(outcome.error), "traceback": outcome.traceback}
                for call, outcome in told
                if isinstance(outcome, Failed)
            ),
        )
        self._gather(
            "task-succeeded",
            (
                {"uuid": call.id, "result": preview(outcome.value, call.task.resultrepr_maxsize), "runtime": run_s}
                for call, outcome in told
                if not isinstance(outcome, Failed)
            ),
        )

    def flush(self) -> None:
        """Send what was gathered. As in Celery, what cannot be sent now is kept for the next connection."""
        dispatcher = self._dispatcher()
        if dispatcher is None:
            return
        gathered, self._gathered = self._gathered, []
        for first in range(0, len(gathered), EVENTS_PER_MESSAGE):
            self._publish(dispatcher, gathered[first : first + EVENTS_PER_MESSAGE])
        dispatcher.flush()

    def _gather(self, kind: str, events: Any) -> None:
        dispatcher = self._dispatcher()
        if dispatcher is None or not dispatcher.enabled or (dispatcher.groups and _GROUP not in dispatcher.groups):
            return
        common = {
            "type": kind,
            "hostname": dispatcher.hostname,
            "utcoffset": utcoffset(),
            "pid": dispatcher.pid,
            "timestamp": time.time(),
            "clock": dispatcher.clock.forward(),
        }
        self._gathered += [common | event for event in events]

    def _publish(self, dispatcher: EventDispatcher, events: list[Event]) -> None:
        try:
            body = msgspec.json.encode(events) if dispatcher.serializer == "json" else None
        except (UnicodeError, TypeError):  # lone surrogates in what somebody's repr has made
            body = None
        with dispatcher.mutex:
            if dispatcher._closed:
                return
            if body is None:
                dispatcher._publish(events, dispatcher.producer, _ROUTING_KEY)
                return
            try:
                dispatcher.producer.publish(
                    body,
                    routing_key=_ROUTING_KEY,
                    exchange=dispatcher.exchange.name,
                    content_type="application/json",
                    content_encoding="utf-8",
                    declare=[dispatcher.exchange],
                    headers=dispatcher.headers,
                    delivery_mode=dispatcher.delivery_mode,
                )
            except Exception as error:  # noqa: BLE001  kombu raises many kinds when a connection goes
                logger.debug("busload: events wait for the next connection: %r", error)
                dispatcher._outbound_buffer.append((events, _ROUTING_KEY))


def preview(value: Any, max_chars: int) -> str:
    """Return the beginning of a result's text, quickly for the results that models give."""
    kind = type(value)
    if kind in _SHORT or (kind is str and len(value) <= max_chars):
        return repr(value)
    if kind is list and len(value) > _SHOWN and all(type(element) in _SHORT for element in value[:_SHOWN]):
        return f"{repr(value[:_SHOWN])[: max_chars - 6].rstrip(']')}, ...]"
    text: str = saferepr(value, max_chars)
    return text
