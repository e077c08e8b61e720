"""The request that Celery keeps of one call, and the call itself on its way through a batch."""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

from celery.utils.log import get_logger
from celery.worker import state
from celery.worker.request import Request
from kombu.message import Message

from ..batching import Outcome
from ..tasks.task import BatchTask

logger = get_logger(__name__)


class BatchRequest(Request):
    """One call of a batched task in the worker's state: reserved, active, revoked, inspected.

    It shares its process and its model call with others, so it can be dropped before it runs, not ended.
    """

    on_revoked: Callable[[Callable[[], None]], None] | None = None
    """Takes the storing of a revocation over, to the thread that stores outcomes."""

    def _announce_revoked(self, *details: Any) -> None:
        announce = super()._announce_revoked
        if self.on_revoked is None:
            announce(*details)
            return
        self._already_revoked = True
        # The message is acknowledged with all others of its call.
        self.acknowledged = True
        self.on_revoked(partial(announce, *details))

    def terminate(self, pool: Any, signal: Any = None) -> None:
        """Refuse ``revoke(terminate=True)`` for a call that is running."""
        logger.warning(
            "Task %s[%s] rides in a batch and cannot be terminated; it was revoked if it had not started",
            self.name,
            self.id,
        )

    def cancel(self, pool: Any, signal: Any = None, emit_retry: bool = True) -> None:
        """Do nothing: at shutdown and on connection loss busload hands calls back itself."""


@dataclass(frozen=True, slots=True)
class Partition:
    """Calls that may ride together: one task, equal shared options."""

    task: str
    options: frozenset[tuple[str, Hashable]]

    @classmethod
    def of(cls, task: str, options: dict[str, Any]) -> Partition:
        return cls(task, frozenset((name, _frozen(value)) for name, value in options.items()))


def differing_options(partitions: Iterable[Partition]) -> list[str]:
    """Return the names of the options by which partitions of one task are apart."""
    sets = [partition.options for partition in partitions]
    shared = frozenset.intersection(*sets)
    return sorted({name for options in sets for name, _ in options - shared})


def _frozen(value: Any) -> Hashable:
    """Return a key that is equal for equal values of equal types alone: True, 1, 1.0 and "1" are four."""
    if isinstance(value, dict):
        return frozenset((_frozen(name), _frozen(item)) for name, item in value.items())
    if isinstance(value, (list, tuple)):
        return type(value), tuple(map(_frozen, value))
    # A float by its text, for NaN equals nothing; so do unhashable values, whose text is all there is.
    is_key = isinstance(value, Hashable) and not isinstance(value, float)
    return type(value), value if is_key else repr(value)


Delivery: TypeAlias = int | Message
"""What brought a call: the tag of a message that is held under this worker's lease, or a message of kombu's."""


def embedded_of(embedded: dict[str, Any] | None) -> dict[str, Any]:
    """Return callbacks, errbacks, chain and chord of a message; nothing where there are none."""
    return embedded if embedded and any(embedded.values()) else {}


@dataclass(slots=True, eq=False, weakref_slot=True)
class Call:
    """One call that the worker holds, on its way through a batch.

    Celery's own Request costs more than the rest of a call. Most never need one, so it is made when asked for; until
    then the call stands for it in the worker's state, as what ``celery inspect`` shows and ``revoke`` finds.
    """

    id: str
    task: BatchTask[Any, ..., Any]
    deliveries: list[Delivery]
    """Every message that brought this call. More than one after a connection was lost and found."""
    embedded: dict[str, Any]
    """Callbacks, errbacks, chain and chord, which travel in the message beside the arguments."""
    make_request: Callable[[], BatchRequest]
    group: str | None = None
    parent_id: str | None = None
    ignore_result: bool = False
    item: Any = None
    shared: dict[str, Any] = field(default_factory=dict)
    own: dict[str, Any] = field(default_factory=dict)
    on_revoked: Callable[[Call, Callable[[], None]], None] | None = None
    """Takes the storing of its revocation over."""
    may_expire: bool = False
    redelivered: bool = False
    """Whether the message says that it was delivered before."""
    traced: Outcome | None = None
    """The outcome that Celery's tracer has stored, once it has."""
    was_sent: bool = False
    """Whether its outcome was sent before, so that the lease may be gone because that got through."""
    came_as: BatchRequest | None = None
    """The request that Celery has made of it, where Celery received it."""
    _request: BatchRequest | None = None
    _started_at: float | None = None

    @classmethod
    def of_request(cls, request: BatchRequest, task: BatchTask[Any, ..., Any], delivery: Delivery) -> Call:
        """Make the call of a request that Celery has made already."""
        context = request.request_dict
        return cls(
            id=str(request.id),
            task=task,
            deliveries=[delivery],
            embedded=embedded_of(request._payload[2]),
            make_request=lambda: request,
            group=context.get("group"),
            parent_id=context.get("parent_id"),
            ignore_result=bool(request.ignore_result),
            may_expire=True,
            redelivered=bool(request.delivery_info.get("redelivered")),
            came_as=request,
        )

    @property
    def name(self) -> str:
        return str(self.task.name)

    @property
    def entry(self) -> Any:
        """What stands for the call in the worker's state: what was put there when it was received."""
        return self.came_as or self

    @property
    def request(self) -> BatchRequest:
        """Celery's own request. Expensive."""
        if self._request is None:
            self._request = self.make_request()
            if self.on_revoked is not None:
                self._request.on_revoked = partial(self.on_revoked, self)
            self.note_start(self._started_at)
        return self._request

    @property
    def eventer(self) -> Any:
        """Who tells monitors. Celery sets it anew after each lost connection; a request made later gets the new one."""
        return self.request.eventer

    @eventer.setter
    def eventer(self, eventer: Any) -> None:
        if self._request is not None:
            self._request.eventer = eventer

    def note_start(self, started_at: float | None) -> None:
        """Note when its batch began to run, in seconds since the epoch."""
        self._started_at = started_at
        if self._request is not None and started_at is not None:
            self._request.time_start = started_at
            self._request.worker_pid = os.getpid()

    def note_end(self) -> None:
        """Note that its messages are let go of with all others of its batch."""
        if self._request is not None:
            self._request.acknowledged = True

    @property
    def stores_errors(self) -> bool:
        return not self.ignore_result or bool(self.task.store_errors_even_if_ignored)

    def is_revoked(self) -> bool:
        """Whether it was revoked or has expired; then Celery's announcement of that is under way."""
        if not self.may_expire and self.id not in state.revoked:
            return False
        return bool(self.request.revoked())

    def __getattr__(self, name: str) -> Any:
        return getattr(self.request, name)
