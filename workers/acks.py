"""Acknowledging and handing back the messages of whole batches."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from celery.utils.log import get_logger
from kombu import Connection
from kombu.message import Message
from kombu.transport import redis, virtual

logger = get_logger(__name__)


class Acks:
    """Acknowledges messages on the consumer's thread, in one round trip a batch over Redis.

    A tag of the Redis transport is a key and outlives its connection. So a message whose acknowledgement was cut
    off is kept and acknowledged over the next connection, where another transport gets it redelivered.
    ``consumer()`` is Celery's, with the channel of the moment.
    """

    def __init__(self, consumer: Callable[[], Any]) -> None:
        self._get_consumer = consumer
        self._pending: deque[Message] = deque()

    @property
    def _consumer(self) -> Any:
        return self._get_consumer()

    def acknowledge(self, messages: Iterable[Message]) -> None:
        self._pending.extend(messages)
        self.flush()

    def flush(self) -> None:
        """Acknowledge what is pending; after an error it stays so."""
        task_consumer = self._consumer.task_consumer
        if task_consumer is None or not self._pending:
            return
        try:
            self._acknowledge(task_consumer.channel)
        except Exception as error:  # noqa: BLE001  kombu raises many kinds when a connection goes
            logger.warning("busload: %d acknowledgements wait for the broker: %r", len(self._pending), error)

    def hand_back(self, messages: list[Message]) -> None:
        """Return messages to their queues, so that the oldest is taken first.

        The connection may be the reason for the stop: then it is done over a new one.
        """
        left = list(messages)
        try:
            self._hand_back(self._consumer.task_consumer.channel, left)
        except Exception as error:  # noqa: BLE001  as above
            logger.warning("busload: handing back over a new connection, for the old one is gone: %r", error)
            try:
                with self._consumer.app.connection_for_read() as connection:
                    self._hand_back(_channel(connection), left)
            except Exception as error:  # noqa: BLE001  as above
                logger.error("busload: the broker is away; it delivers %d calls again by itself: %r", len(left), error)

    def _acknowledge(self, channel: Any) -> None:
        if not isinstance(channel.qos, redis.QoS):
            while self._pending:
                self._pending.popleft().ack_log_error(logger, self._consumer.connection_errors)
            return
        messages = list(self._pending)
        with channel.qos.pipe_or_acquire() as pipe:
            for message in messages:
                channel.qos._remove_from_indices(message.delivery_tag, pipe)
            pipe.execute()
        for message in messages:
            self._pending.popleft()
            virtual.QoS.ack(message.channel.qos, message.delivery_tag)

    def _hand_back(self, channel: Any, messages: list[Message]) -> None:
        while messages:
            message = messages[-1]
            if isinstance(channel.qos, redis.QoS):
                # Workers take from the right end of the list, where this puts it.
                channel.qos.restore_by_tag(message.delivery_tag, leftmost=False)
                virtual.QoS.ack(message.channel.qos, message.delivery_tag)
            else:
                message.reject_log_error(logger, self._consumer.connection_errors, requeue=True)
            messages.pop()


def keep_at_close(channel: Any, held: Callable[[], set[str]]) -> None:
    """Let ``channel`` restore, when it closes, only messages whose tags are not in ``held()``.

    kombu puts back what is unacknowledged when a connection is lost: what we are about to finish would run twice.
    It also tries to do so over the lost connection, and its error then ends a worker that could have gone on.
    """
    qos = channel.qos
    if not isinstance(qos, redis.QoS):
        return
    restore = qos.restore_unacked_once

    def restore_others(stderr: Any = None) -> None:
        for tag in held():
            qos._delivered.pop(tag, None)
        try:
            restore(stderr)
        except Exception as error:  # noqa: BLE001  as above
            logger.warning("busload: kombu could not put back %d messages: %r", len(qos._delivered), error)

    qos.restore_unacked_once = restore_others


def _channel(connection: Connection) -> Any:
    connection.ensure_connection(max_retries=1)
    return connection.default_channel
