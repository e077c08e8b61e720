"""Acknowledging and handing back the messages of whole batches."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from celery.utils.log import get_logger
from kombu.exceptions import OperationalError
from kombu.message import Message
from kombu.transport import redis, virtual

logger = get_logger(__name__)


class Acks:
    """Acknowledges messages on the consumer's thread, in one round trip a batch over Redis.

    A tag of the Redis transport is a key and outlives its connection. So a message whose acknowledgement was cut
    off is kept and acknowledged over the next connection, where another transport gets it redelivered.
    ``channel()`` returns the channel that the worker consumes on now, None while it has none.
    """

    def __init__(self, channel: Callable[[], Any], connection_errors: tuple[type[BaseException], ...]) -> None:
        self._channel = channel
        self._connection_errors = connection_errors
        self._pending: deque[Message] = deque()

    def acknowledge(self, messages: Iterable[Message]) -> None:
        self._pending.extend(messages)
        self.flush()

    def flush(self) -> None:
        """Acknowledge what is pending; after a connection error it stays so."""
        channel = self._channel()
        if channel is None:
            return
        try:
            if isinstance(channel.qos, redis.QoS):
                self._acknowledge_together(channel.qos)
            else:
                while self._pending:
                    self._pending.popleft().ack_log_error(logger, self._connection_errors)
        except self._connection_errors as error:
            logger.warning("busload: %d acknowledgements wait for the broker: %r", len(self._pending), error)

    def hand_back(self, messages: list[Message]) -> None:
        """Return messages to their queues, so that the oldest is taken first. Connection errors propagate."""
        channel = self._channel()
        if channel is None:
            raise OperationalError("there is no connection to the broker")
        for message in reversed(messages):
            if isinstance(channel.qos, redis.QoS):
                # Workers take from the right end of the list, where this puts it.
                channel.qos.restore_by_tag(message.delivery_tag, leftmost=False)
                virtual.QoS.ack(message.channel.qos, message.delivery_tag)
            else:
                message.reject_log_error(logger, self._connection_errors, requeue=True)

    def _acknowledge_together(self, qos: redis.QoS) -> None:
        messages = list(self._pending)
        if not messages:
            return
        with qos.pipe_or_acquire() as pipe:
            for message in messages:
                qos._remove_from_indices(message.delivery_tag, pipe)
            pipe.execute()
        for message in messages:
            self._pending.popleft()
            virtual.QoS.ack(message.channel.qos, message.delivery_tag)
