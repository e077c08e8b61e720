"""Letting go of the messages of whole batches: those under a lease, and those that kombu has received."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from celery.utils.log import get_logger
from kombu.message import Message

from .drain import Drain
from .request import Call

logger = get_logger(__name__)


class Acks:
    """Releases calls that are settled and hands back those that are not.

    A lease is let go of from any thread, a message of kombu's on the consumer's thread alone. ``consumer()`` is
    Celery's, with the channel of the moment.
    """

    def __init__(self, consumer: Callable[[], Any], drain: Drain) -> None:
        self._consumer = consumer
        self._drain = drain

    def still_ours(self, calls: list[Call]) -> list[Call]:
        """Return the calls that no other worker can have got. Redis errors propagate."""
        lost = self._drain.lost(lambda: tags_of(calls))
        return [call for call in calls if not lost.issuperset(call.deliveries)] if lost else calls

    def release(self, calls: list[Call]) -> None:
        """Let go of what lies under the lease. Redis errors propagate."""
        tags = tags_of(calls)
        if tags and self._drain.leases is not None:
            self._drain.leases.release(tags)

    def acknowledge(self, calls: Iterable[Call]) -> None:
        """Acknowledge messages of kombu's, on the consumer's thread."""
        for message in messages_of(calls):
            message.ack_log_error(logger, self._consumer().connection_errors)

    def hand_back(self, calls: list[Call]) -> None:
        """Return everything that is held to its queue, in its order."""
        try:
            self._drain.end()
        except Exception as error:  # noqa: BLE001  redis-py raises many kinds when a connection goes
            logger.error("busload: the broker is away; what is held goes back when the lease ends: %r", error)
        for message in messages_of(calls):
            message.reject_log_error(logger, self._consumer().connection_errors, requeue=True)


def tags_of(calls: Iterable[Call]) -> list[int]:
    """Return the tags under which calls are leased."""
    return [delivery for call in calls for delivery in call.deliveries if isinstance(delivery, int)]


def messages_of(calls: Iterable[Call]) -> list[Message]:
    """Return the messages of kombu's that brought calls."""
    return [delivery for call in calls for delivery in call.deliveries if not isinstance(delivery, int)]
