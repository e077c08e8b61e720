"""kombu's Redis transport as a busload worker reads with it: queues of batched tasks are not popped but drained.

Producers, stock workers and remote control use kombu's own transport and see no difference: lists, bindings and
broadcasts stay where they are.
"""

from __future__ import annotations

from typing import Any, Protocol

from kombu import Connection
from kombu.transport import redis
from kombu.utils.encoding import bytes_to_str
from kombu.utils.json import loads


class Drained(Protocol):
    """What the transport leaves its drained queues to."""

    def takes(self, queue: str) -> bool:
        """Whether a queue is drained; others are popped as always."""
        ...

    def consume(self, queue: str, channel: LeasedChannel) -> None: ...

    def cancel(self, queue: str) -> None: ...

    def release(self, tag: int) -> None:
        """Let go of a message that is done with."""
        ...

    def hand_back(self, tag: int) -> None: ...


class LeasedQoS(redis.QoS):
    """Messages under a lease are in no book of kombu's: a lost channel must not put them back."""

    def append(self, message: Any, delivery_tag: Any) -> None:
        if leased_tag(delivery_tag) is None:
            super().append(message, delivery_tag)

    def ack(self, delivery_tag: Any) -> None:
        tag = leased_tag(delivery_tag)
        if tag is None:
            super().ack(delivery_tag)
        else:
            self.channel.drain.release(tag)

    def reject(self, delivery_tag: Any, requeue: bool = False) -> None:
        tag = leased_tag(delivery_tag)
        if tag is None:
            super().reject(delivery_tag, requeue=requeue)
        elif requeue:
            self.channel.drain.hand_back(tag)
        else:
            self.channel.drain.release(tag)


class LeasedChannel(redis.Channel):
    """A channel whose drained queues are read by somebody else."""

    QoS = LeasedQoS
    drain: Drained

    def basic_consume(self, queue: str, *arguments: Any, **options: Any) -> Any:
        consumed = super().basic_consume(queue, *arguments, **options)
        if self.drain.takes(queue):
            self.drain.consume(queue, self)
        return consumed

    def _basic_cancel(self, consumer_tag: str) -> Any:
        queue = self._tag_to_queue.get(consumer_tag)
        cancelled = super()._basic_cancel(consumer_tag)
        if queue is not None and self.drain.takes(queue):
            self.drain.cancel(queue)
        return cancelled

    @property
    def active_queues(self) -> list[str]:
        """Those that kombu itself pops from."""
        return [queue for queue in super().active_queues if not self.drain.takes(queue)]

    def lists_of(self, queue: str) -> list[str]:
        """Return the keys of the lists of ``queue``, most urgent first."""
        return [f"{self.global_keyprefix}{self._q_for_pri(queue, priority)}" for priority in self.priority_steps]


def read_message(tag: int, text: bytes, channel: Any) -> Any:
    """Return kombu's message of what was drained. Raises whatever a codec raises for what cannot be read."""
    payload = loads(bytes_to_str(text))
    payload["properties"]["delivery_tag"] = f"{_LEASED}{tag}"
    return channel.Message(payload, channel=channel)


_LEASED = "busload-lease:"


def leased_tag(delivery_tag: Any) -> int | None:
    """Return the tag of a message that is held under our lease, None for one of kombu's."""
    if isinstance(delivery_tag, str) and delivery_tag.startswith(_LEASED):
        return int(delivery_tag[len(_LEASED) :])
    return None


def leased(connection: Connection, drain: Drained) -> Connection:
    """Return ``connection``, not yet connected, with its Redis transport reading through ``drain``."""
    stock = connection.get_transport_cls()
    channel = type("LeasedChannel", (LeasedChannel, stock.Channel), {"drain": drain})
    transport = type("LeasedTransport", (stock,), {"Channel": channel})
    connection.get_transport_cls = lambda: transport
    return connection


def is_redis(connection: Connection) -> bool:
    """Whether a connection's transport is kombu's for Redis, with Sentinel or without."""
    return issubclass(connection.get_transport_cls(), redis.Transport)
