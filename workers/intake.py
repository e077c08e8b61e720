"""The waiting room: a lock and a clock around the pure batcher."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter

from ..batching import NEVER, NOW, Batch, Batcher, Pace, Policy
from .request import Call, Partition

# One batch in the model, one prepared behind it.
MAX_BATCHES_TAKEN = 2


@dataclass(frozen=True, slots=True)
class Appetite:
    """From when until when more calls are welcome, and whether that is because the runner has nothing to do."""

    from_at: float
    until_at: float
    runner_free: bool


class Intake:
    """Takes calls from those who receive them and gives batches to the preparing thread.

    A batch that is not full leaves only when the runner has nothing to do, so that it can still fill. A full one
    leaves while the runner is busy, to be prepared ahead. ``changed`` is called when the appetite may have.
    """

    def __init__(
        self,
        policy_of: Callable[[Partition], Policy],
        clock: Callable[[], float] = time.monotonic,
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        self._batcher: Batcher[Partition, Call] = Batcher(policy_of)
        self._clock = clock
        self._tell = changed
        self._pace = Pace()
        self._changed = threading.Condition()
        self._taken = 0
        self._running: tuple[str, float] | None = None
        self._closed = False
        self._gathering = False
        # When take() looks again by itself. Waking it for every call would cost more than the call.
        self._looks_at = NEVER

    def __len__(self) -> int:
        with self._changed:
            return len(self._batcher)

    def offer(self, partition: Partition, call: Call) -> list[Partition]:
        """Let ``call`` wait from now on. Return the partitions of its task when it opened a new one, else nothing."""
        return self.offer_all([(partition, call)], self._clock())

    def offer_all(self, calls: Iterable[tuple[Partition, Call]], now: float) -> list[Partition]:
        """Let calls wait as if offered at ``now``. Return the partitions of all tasks for which a new one opened."""
        with self._changed:
            opened = set()
            for partition, group in groupby(calls, key=itemgetter(0)):
                if partition not in self._batcher:
                    opened.add(partition.task)
                self._batcher.offer_all(partition, [call for _, call in group], now)
            if self._batcher.next_flush_at(self._runner_free) < self._looks_at:
                self._changed.notify_all()
            return [other for other in self._batcher if other.task in opened] if opened else []

    def take(self) -> Batch[Partition, Call] | None:
        """Wait for the next batch that is due; None once the intake is closed."""
        with self._changed:
            while not self._closed:
                if self._taken < MAX_BATCHES_TAKEN:
                    now = self._clock()
                    may_be_partial = self._runner_free and not self._gathering
                    batch = self._batcher.flush_due(now, may_be_partial)
                    if batch is not None:
                        self._taken += 1
                        return batch
                    self._looks_at = self._batcher.next_flush_at(may_be_partial)
                    self._changed.wait(None if self._looks_at == NEVER else self._looks_at - now)
                else:
                    self._looks_at = NOW  # no new call can make it sooner; batch_done() will
                    self._changed.wait()
            return None

    @contextmanager
    def gathering(self) -> Iterator[None]:
        """Let only full batches leave inside the block, in which more calls come by the handful."""
        with self._changed:
            self._gathering = True
        try:
            yield
        finally:
            with self._changed:
                self._gathering = False
                self._changed.notify_all()

    def appetite(self) -> Appetite:
        """Say when calls are welcome that still wait in their queue, where any other worker may take them."""
        with self._changed:
            if self._runner_free:
                return Appetite(NOW, NEVER, runner_free=True)
            if self._running is None:
                return Appetite(NEVER, NEVER, runner_free=False)
            has_full = self._batcher.next_flush_at(runner_free=False) == NOW
            ready = self._taken - 1 + has_full
            is_enough = ready >= self._pace.batches_ahead(self._running[0])
            window = None if is_enough else self._pace.fetch_window(*self._running)
            return Appetite(*(window or (NEVER, NEVER)), runner_free=False)

    def has_full_batch(self) -> bool:
        """Whether a batch could leave however busy the runner is."""
        with self._changed:
            return self._batcher.next_flush_at(runner_free=False) == NOW

    @property
    def _runner_free(self) -> bool:
        return self._taken == 0

    def stepped(self, step: str, step_s: float) -> None:
        """Say how long a step took that leads to a batch which is ready to run: fetching, preparing."""
        with self._changed:
            self._pace.stepped(step, step_s)

    def batch_began(self, task: str) -> None:
        """Say that the runner begins with a batch that ``take`` gave."""
        with self._changed:
            self._running = task, self._clock()
        self._tell()

    def batch_done(self) -> None:
        """Say that the runner is through with a batch that ``take`` gave."""
        with self._changed:
            if self._running is not None:
                task, began_at = self._running
                self._pace.ran(task, self._clock() - began_at)
                self._running = None
        self.batch_dropped()

    def batch_dropped(self) -> None:
        """Say that a batch that ``take`` gave will not run."""
        with self._changed:
            self._taken -= 1
            self._changed.notify_all()
        self._tell()

    def close(self) -> list[Call]:
        """Give no more batches, and return the calls that still wait, oldest first in each partition."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            return [call for batch in self._batcher.drain() for call in batch.items]
