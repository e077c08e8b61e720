"""Fetching what waits behind a message in one call, instead of one message at a time.

Stock kombu takes each message from a Redis list in two round trips. Once one message of a batched task has come
that way, the rest of its batch is moved by one script from the queue's lists to the same unacked keys that kombu
uses: restoring, acknowledging and stock workers see no difference.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from celery.utils.log import get_logger
from kombu.message import Message
from kombu.transport import redis, virtual
from kombu.utils.encoding import bytes_to_str
from kombu.utils.json import loads

logger = get_logger(__name__)

MAX_BYTES = 8 * 1024 * 1024
"""Of one call; what is left comes with the next."""

# KEYS: the unacked hash, its index, then the queue's list of each priority, most urgent first.
# ARGV: how many messages at most, how many bytes at most, the time in seconds since the epoch.
# One element of a list becomes [message, exchange, routing key] in the hash, the message's text unchanged.
_MOVE = """
local taken, bytes = {}, 0
for queue = 3, #KEYS do
    while #taken < tonumber(ARGV[1]) and bytes < tonumber(ARGV[2]) do
        local text = redis.call('RPOP', KEYS[queue])
        if not text then break end
        local readable, message = pcall(cjson.decode, text)
        local properties = readable and type(message) == 'table' and message.properties
        if type(properties) ~= 'table' or type(properties.delivery_tag) ~= 'string'
                or type(properties.delivery_info) ~= 'table' then
            -- Not for this script to judge: kombu takes it next.
            redis.call('RPUSH', KEYS[queue], text)
            return taken
        end
        local info = properties.delivery_info
        local origin = cjson.encode({info.exchange or '', info.routing_key or ''})
        redis.call('ZADD', KEYS[2], ARGV[3], properties.delivery_tag)
        redis.call('HSET', KEYS[1], properties.delivery_tag, '[' .. text .. ', ' .. string.sub(origin, 2))
        taken[#taken + 1] = text
        bytes = bytes + #text
    end
end
return taken
"""


class Drain:
    """Delivers the waiting messages of a queue to Celery's consumer, up to its prefetch limit.

    Over other transports than Redis it does nothing.
    """

    def __init__(self, consumer: Any) -> None:
        self.consumer = consumer
        self._asked: set[str] = set()
        self._delivering = False

    def soon(self, queue: str) -> None:
        """Drain ``queue`` at the end of this turn of the event loop, because a message came from it."""
        if self._delivering or queue in self._asked:
            return
        if isinstance(self.consumer.task_consumer.channel, redis.Channel):
            self._asked.add(queue)
            self.consumer.call_soon(self._drain, queue)

    def _drain(self, queue: str) -> None:
        self._asked.discard(queue)
        task_consumer = self.consumer.task_consumer
        if task_consumer is None or not task_consumer.consuming_from(queue):
            return
        texts = self._move(task_consumer.channel, queue)
        # All are on the channel's books before the first is handled: whatever happens then, it restores the rest.
        messages = list(self._messages(task_consumer.channel, texts))
        self._delivering = True
        try:
            for message in messages:
                task_consumer._receive_callback(message)
        finally:
            self._delivering = False
        if sum(map(len, texts)) >= MAX_BYTES:
            self.soon(queue)

    def _move(self, channel: redis.Channel, queue: str) -> list[bytes]:
        wanted = channel.qos.can_consume_max_estimate()
        if wanted is not None and wanted <= 0:
            return []
        keys = [channel.unacked_key, channel.unacked_index_key]
        keys += [channel._q_for_pri(queue, priority) for priority in channel.priority_steps]
        with channel.conn_or_acquire() as client:
            # kombu's client puts no prefix before the keys of EVAL.
            texts: list[bytes] = client.eval(
                _MOVE,
                len(keys),
                *[f"{channel.global_keyprefix}{key}" for key in keys],
                wanted or 0,
                MAX_BYTES,
                time.time(),
            )
        return texts

    def _messages(self, channel: redis.Channel, texts: list[bytes]) -> Iterator[Message]:
        for text in texts:
            payload = loads(bytes_to_str(text))
            try:
                message = channel.Message(payload, channel=channel)
            except Exception as error:  # noqa: BLE001  whatever a codec raises
                # As Celery does with what it cannot decode, or it would come back for ever.
                logger.critical("busload: dropping a message that cannot be read: %r", error)
                channel.qos._remove_from_indices(payload["properties"]["delivery_tag"]).execute()
                continue
            virtual.QoS.append(channel.qos, message, message.delivery_tag)
            yield message
