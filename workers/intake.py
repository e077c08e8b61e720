"""The waiting room: a lock and a clock around the pure batcher."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from ..batching import NEVER, NOW, Batch, Batcher, Policy
from .request import Call, Partition

# One batch in the model, one prepared behind it.
MAX_BATCHES_TAKEN = 2


class Intake:
    """Takes calls from the consumer's thread and gives batches to the preparing thread.

    A batch that is not full leaves only when the runner has nothing to do, so that it can still fill. A full one
    leaves while the runner is busy, to be prepared ahead.
    """

    def __init__(
        self,
        policy_of: Callable[[Partition], Policy],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._batcher: Batcher[Partition, Call] = Batcher(policy_of)
        self._clock = clock
        self._changed = threading.Condition()
        self._taken = 0
        self._closed = False
        # When take() looks again by itself. Waking it for every call would cost more than the call.
        self._looks_at = NEVER

    def __len__(self) -> int:
        with self._changed:
            return len(self._batcher)

    def offer(self, partition: Partition, call: Call) -> list[Partition]:
        """Let ``call`` wait. Return the partitions of its task when it opened a new one, else nothing."""
        with self._changed:
            is_new = partition not in self._batcher
            self._batcher.offer(partition, call, self._clock())
            if self._batcher.next_flush_at(self._runner_free) < self._looks_at:
                self._changed.notify_all()
            if not is_new:
                return []
            return [other for other in self._batcher if other.task == partition.task]

    def take(self) -> Batch[Partition, Call] | None:
        """Wait for the next batch that is due; None once the intake is closed."""
        with self._changed:
            while not self._closed:
                if self._taken < MAX_BATCHES_TAKEN:
                    now = self._clock()
                    batch = self._batcher.flush_due(now, self._runner_free)
                    if batch is not None:
                        self._taken += 1
                        return batch
                    self._looks_at = self._batcher.next_flush_at(self._runner_free)
                    self._changed.wait(None if self._looks_at == NEVER else self._looks_at - now)
                else:
                    self._looks_at = NOW  # no new call can make it sooner; batch_done() will
                    self._changed.wait()
            return None

    @property
    def _runner_free(self) -> bool:
        return self._taken == 0

    def batch_done(self) -> None:
        """Say that the runner is through with a batch that ``take`` gave."""
        with self._changed:
            self._taken -= 1
            self._changed.notify_all()

    def close(self) -> list[Call]:
        """Give no more batches, and return the calls that still wait, oldest first in each partition."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            return [call for batch in self._batcher.drain() for call in batch.items]
