"""The request that Celery keeps of one call, and the call itself on its way through a batch."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from celery.utils.log import get_logger
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


@dataclass(slots=True, eq=False)
class Call:
    """One call that the worker holds."""

    request: BatchRequest
    task: BatchTask[Any, ..., Any]
    item: Any = None
    shared: dict[str, Any] = field(default_factory=dict)
    own: dict[str, Any] = field(default_factory=dict)
    deliveries: list[Message] = field(default_factory=list)
    """Every message that brought this call. More than one after a connection was lost and found."""

    traced: Outcome | None = None
    """The outcome that Celery's tracer has stored, once it has."""

    @property
    def id(self) -> str:
        return str(self.request.id)

    @property
    def embedded(self) -> dict[str, Any]:
        """Callbacks, errbacks, chain and chord, which travel in the message beside the arguments."""
        return self.request._payload[2] or {}

    @property
    def redelivered(self) -> bool:
        return bool(self.request.delivery_info.get("redelivered"))
