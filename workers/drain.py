"""Peek, decide, drain: messages stay in Redis until a batch of them can leave, then come in one call.

Until then any other worker may take them, so that any number of workers form full batches of one queue.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import redis
from celery.utils.log import get_logger

from ..batching import NEVER, Policy, QueueWatch
from ..tasks.leases import broker_client
from . import crashes
from .doorbell import Doorbell
from .intake import Appetite, Intake
from .leases import LeaseKeeper, Leases
from .transport import LeasedChannel

logger = get_logger(__name__)

BROKER_TIMEOUT_S = 5.0
"""How long the broker may take to answer before it counts as away, unless ``socket_timeout`` says otherwise."""

_FIRST_RETRY_S = 0.05
_LAST_RETRY_S = 1.0
# A connection whose other end has vanished never rings.
_LONGEST_WAIT_S = 5.0

Messages = Sequence[tuple[int, bytes]]


@dataclass(slots=True)
class DrainedQueue:
    """A queue that is being drained."""

    name: str
    lists: list[str]
    policies: list[Policy]
    """Of the tasks whose calls come by this queue."""
    watch: QueueWatch = field(default_factory=QueueWatch)

    @property
    def full(self) -> int:
        """From how many messages on one of the tasks may have a full batch."""
        return min(policy.max_batch_size for policy in self.policies)

    @property
    def portion(self) -> int:
        """How many to move at once: a batch and no more, for the beginning of another would leave without company."""
        largest = max(policy.max_batch_size for policy in self.policies)
        return largest if self.watch.depth >= largest else self.full

    @property
    def seen_at(self) -> float:
        return self.watch.oldest_at if self.watch.depth else NEVER

    def flush_at(self, runner_free: bool) -> float:
        if not self.watch.depth:
            return NEVER
        return min(policy.flush_at(self.watch.depth, self.watch.oldest_at, runner_free) for policy in self.policies)


class Receiver(Protocol):
    """Who takes what was drained, on the draining thread."""

    def receive(self, queue: str, messages: Messages, first_seen_at: float) -> None: ...


class Drain:
    """Moves messages from queues to this worker, on a thread of its own, when its intake wants them.

    What it holds and has not yet been settled never exceeds the prefetch count of the consuming channel.
    """

    def __init__(
        self, intake: Intake, receiver: Receiver, policies_of: Callable[[str], list[Policy]], incarnation: str
    ) -> None:
        self._incarnation = incarnation
        self._intake = intake
        self._receiver = receiver
        self._policies_of = policies_of
        self._policies: dict[str, list[Policy]] = {}
        self.leases: Leases | None = None
        self._keeper: LeaseKeeper | None = None
        self._doorbell: Doorbell | None = None
        self._channel: Any = None
        self._queues: dict[str, DrainedQueue] = {}
        self._lock = threading.Lock()
        self._done: deque[int] = deque()
        self._returned: deque[int] = deque()
        self._stopping = False
        self._starved = False
        self._thread = threading.Thread(target=crashes.guard(self._run), name="busload-drain", daemon=True)

    # -- on the consumer's thread ----------------------------------------------------------------------

    def connected(self, channel: LeasedChannel) -> None:
        """Begin, once, with a client of the broker behind ``channel`` that lasts as long as the worker."""
        if self.leases is not None:
            return
        client = broker_client(channel, BROKER_TIMEOUT_S)
        self.leases = Leases(client, channel.global_keyprefix, self._incarnation)
        self._doorbell = Doorbell(client)
        self._keeper = LeaseKeeper(self.leases, self.wake)
        self._keeper.start()
        self._thread.start()

    def takes(self, queue: str) -> bool:
        if queue not in self._policies:
            self._policies[queue] = self._policies_of(queue)
        return bool(self._policies[queue])

    def consume(self, queue: str, channel: Any) -> None:
        with self._lock:
            self._channel = channel
            self._queues[queue] = DrainedQueue(queue, channel.lists_of(queue), self._policies[queue])
        self.wake()

    def cancel(self, queue: str) -> None:
        with self._lock:
            self._queues.pop(queue, None)
        self.wake()

    # -- on any thread ---------------------------------------------------------------------------------

    def wake(self) -> None:
        if self._doorbell is not None:
            self._doorbell.wake()

    def made_room(self) -> None:
        """Say that some of what is held was let go."""
        if self._starved:
            self.wake()

    def release(self, tag: int) -> None:
        self._done.append(tag)
        self.wake()

    def hand_back(self, tag: int) -> None:
        self._returned.append(tag)
        self.wake()

    def lost(self, tags: Callable[[], Iterable[int]]) -> set[int]:
        """Return those of ``tags()`` that are not ours any more. The broker is asked only if there is doubt."""
        if self.leases is None or not (self.leases.lost or self.leases.has_lapsed()):
            return set()
        asked = set(tags())
        gone = asked & self.leases.lost
        return asked - self.leases.still_held(asked - gone) if self.leases.has_lapsed() else gone

    def stop(self) -> None:
        """Take no more; what is held stays so, and its lease is renewed."""
        self._stopping = True
        self.wake()

    def end(self) -> None:
        """Give back what is still held, and the lease. Redis errors propagate; then it runs out by itself."""
        if self.leases is None or self._keeper is None:
            return
        self._keeper.stop()
        self._thread.join(timeout=_LAST_RETRY_S)
        self._flush()
        self.leases.end()

    # -- on the draining thread ------------------------------------------------------------------------

    def _run(self) -> None:
        assert self._doorbell is not None
        retry_s = _FIRST_RETRY_S
        while not self._stopping:
            try:
                self._turn()
                retry_s = _FIRST_RETRY_S
            except redis.RedisError as error:
                logger.warning("busload: the broker is away, trying again: %r", error)
                self._doorbell.disconnect()
                time.sleep(retry_s)
                retry_s = min(2 * retry_s, _LAST_RETRY_S)
        self._doorbell.disconnect()

    def _turn(self) -> None:
        """Do what is due, then wait until something may be."""
        assert self._doorbell is not None
        assert self.leases is not None
        self._flush()
        with self._lock:
            queues = list(self._queues.values())
        if not queues:
            self._doorbell.wait(None, for_messages=False)
            return
        if self.leases.in_doubt:
            # What a cut off move has brought belongs to a queue that the message itself does not tell.
            self._receiver.receive(queues[0].name, self.leases.reconcile(), time.monotonic())
        appetite, now = self._intake.appetite(), time.monotonic()
        self._starved = True
        if self._room() <= 0:
            self._doorbell.wait(_LONGEST_WAIT_S, for_messages=False)
            return
        self._starved = False
        if not appetite.from_at <= now < appetite.until_at:
            until_s = appetite.from_at - now if now < appetite.from_at < NEVER else None
            self._doorbell.wait(until_s, for_messages=False)
            return
        depths = self._doorbell.look(self.leases.keys.drained, [queue.lists for queue in queues])
        now = time.monotonic()
        for queue, (depth, drained) in zip(queues, depths, strict=True):
            queue.watch.see(depth, drained, now)
        due = min(queues, key=lambda queue: (queue.flush_at(appetite.runner_free), queue.seen_at))
        if due.flush_at(appetite.runner_free) <= now:
            self._gather(due)
        else:
            self._wait_for_more(queues, appetite, now)

    def _gather(self, queue: DrainedQueue) -> None:
        """Drain until some batch is full, or nothing is left, or no more may be held."""
        assert self.leases is not None
        began_at, first_seen_at = time.monotonic(), queue.watch.oldest_at
        with self._intake.gathering():
            while (room := self._room()) > 0:
                depth, drained, messages = self.leases.move(
                    queue.lists,
                    at_most=min(room, queue.portion),
                    seen_drained=queue.watch.drained,
                    full_depth=queue.full,
                )
                queue.watch.see(depth, drained, time.monotonic())
                self._receiver.receive(queue.name, messages, first_seen_at)
                if not messages or not depth or self._intake.has_full_batch():
                    break
        self._intake.stepped("fetch", time.monotonic() - began_at)

    def _wait_for_more(self, queues: list[DrainedQueue], appetite: Appetite, now: float) -> None:
        assert self._doorbell is not None
        waiting = [queue for queue in queues if queue.watch.depth]
        looks_s = [queue.watch.look_again_in_s(queue.full, now) for queue in waiting]
        times = [queue.flush_at(appetite.runner_free) - now for queue in queues] + [appetite.until_at - now]
        until_s = min([*looks_s, *times, _LONGEST_WAIT_S])
        # While messages gather each new one would ring; looking now and then costs less.
        self._doorbell.wait(until_s, for_messages=len(waiting) < len(queues))

    def _room(self) -> int:
        assert self.leases is not None
        return int(self._channel.qos.prefetch_count) - len(self.leases.tags)

    def _flush(self) -> None:
        """Carry out what other threads have left to do for single messages."""
        assert self.leases is not None
        for tags, carry_out in ((self._done, self.leases.release), (self._returned, self.leases.hand_back)):
            if tags:
                batch = list(tags)
                carry_out(batch)
                for _ in batch:
                    tags.popleft()
