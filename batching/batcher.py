"""What rides together, and when it leaves. Pure: no I/O, no clock, no threads; time is an argument."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from .policies import NEVER, Policy

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Batch(Generic[K, T]):
    """Items of one partition, in the order in which they were offered."""

    partition: K
    items: list[T]


@dataclass(slots=True)
class _Line(Generic[T]):
    """The items of one partition that wait, oldest first, each with the time of its offer."""

    policy: Policy
    waiting: deque[tuple[float, T]] = field(default_factory=deque)

    def flush_at(self, runner_free: bool) -> float:
        return self.policy.flush_at(len(self.waiting), self.waiting[0][0], runner_free)


class Batcher(Generic[K, T]):
    """Sorts offered items into partitions and says which batch leaves when.

    ``policy_of(partition)`` gives the policy of a partition when its first item comes. All times are seconds
    on one clock of the caller's that never runs backwards.
    """

    def __init__(self, policy_of: Callable[[K], Policy]) -> None:
        self._policy_of = policy_of
        self._lines: dict[K, _Line[T]] = {}

    def __len__(self) -> int:
        return sum(len(line.waiting) for line in self._lines.values())

    def __iter__(self) -> Iterator[K]:
        """Yield the partitions with at least one waiting item."""
        return iter(self._lines)

    def __contains__(self, partition: object) -> bool:
        return partition in self._lines

    def offer(self, partition: K, item: T, now: float) -> None:
        """Let ``item`` wait in ``partition`` from ``now`` on."""
        self.offer_all(partition, [item], now)

    def offer_all(self, partition: K, items: Iterable[T], now: float) -> None:
        """Let ``items`` wait in ``partition`` from ``now`` on, in their order."""
        line = self._lines.get(partition)
        if line is None:
            line = self._lines[partition] = _Line(self._policy_of(partition))
        line.waiting.extend((now, item) for item in items)

    def next_flush_at(self, runner_free: bool = True) -> float:
        """Return the earliest time at which a batch is due; ``policies.NEVER`` while none will be."""
        return min((line.flush_at(runner_free) for line in self._lines.values()), default=NEVER)

    def flush_due(self, now: float, runner_free: bool = True) -> Batch[K, T] | None:
        """Take the batch that is due and whose first item has waited longest; None if none is due at ``now``.

        When a full batch is due behind a busy runner, one that is overdue goes before it: else full batches that
        keep coming would hold it back for ever.
        """
        if self.next_flush_at(runner_free) > now:
            return None
        overdue = [
            (line.waiting[0][0], partition)
            for partition, line in self._lines.items()
            if line.flush_at(runner_free=True) <= now
        ]
        return self._take(min(overdue, key=lambda candidate: candidate[0])[1])

    def drain(self) -> list[Batch[K, T]]:
        """Take everything that waits, due or not, in batches no larger than their policies allow."""
        batches = []
        while self._lines:
            batches.append(self._take(next(iter(self._lines))))
        return batches

    def _take(self, partition: K) -> Batch[K, T]:
        line = self._lines[partition]
        count = min(len(line.waiting), line.policy.max_batch_size)
        items = [line.waiting.popleft()[1] for _ in range(count)]
        if not line.waiting:
            del self._lines[partition]
        return Batch(partition, items)
