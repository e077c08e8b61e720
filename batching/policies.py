"""When a batch leaves. A policy is a frozen value: it sees a partition and answers with a time."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

NOW = -math.inf
NEVER = math.inf


class Policy(Protocol):
    """Decides from the number of waiting items, the age of the oldest and the runner when to flush."""

    @property
    def max_batch_size(self) -> int: ...

    def flush_at(self, waiting: int, oldest_at: float, runner_free: bool) -> float:
        """Return the time in seconds, on the caller's clock, from which ``waiting`` items may leave.

        ``oldest_at`` is when the first of them was offered. NOW and NEVER are valid answers.
        """
        ...


@dataclass(frozen=True, slots=True)
class StaticPolicy:
    """Flush when ``max_batch_size`` items wait, or once the oldest has waited ``max_wait_ms``.

    The wait binds while the runner is free; behind a running batch an incomplete one keeps filling.
    """

    max_batch_size: int = 64
    max_wait_ms: float = 50.0

    def __post_init__(self) -> None:
        _check_size(self.max_batch_size)
        if isinstance(self.max_wait_ms, bool) or not isinstance(self.max_wait_ms, (int, float)):
            raise TypeError(f"max_wait_ms must be a number, got {self.max_wait_ms!r}")
        if not (self.max_wait_ms >= 0 and math.isfinite(self.max_wait_ms)):
            raise ValueError(f"max_wait_ms must be a finite number >= 0, got {self.max_wait_ms}")

    def flush_at(self, waiting: int, oldest_at: float, runner_free: bool) -> float:
        if waiting >= self.max_batch_size:
            return NOW
        return oldest_at + self.max_wait_ms / 1000 if runner_free else NEVER


@dataclass(frozen=True, slots=True)
class GreedyPolicy:
    """Flush whenever the runner is free, with whatever waits, up to ``max_batch_size`` items."""

    max_batch_size: int = 64

    def __post_init__(self) -> None:
        _check_size(self.max_batch_size)

    def flush_at(self, waiting: int, oldest_at: float, runner_free: bool) -> float:
        return NOW if runner_free or waiting >= self.max_batch_size else NEVER


def _check_size(max_batch_size: int) -> None:
    if isinstance(max_batch_size, bool) or not isinstance(max_batch_size, int):
        raise TypeError(f"max_batch_size must be an int, got {max_batch_size!r}")
    if max_batch_size < 1:
        raise ValueError(f"max_batch_size must be >= 1, got {max_batch_size}")


def make_policy(name: str, max_batch_size: int, max_wait_ms: float) -> Policy:
    """Build the policy that a task names: ``static`` or ``greedy``.

    Raises ValueError for another name, or for limits out of range.
    """
    if name == "static":
        return StaticPolicy(max_batch_size, max_wait_ms)
    if name == "greedy":
        return GreedyPolicy(max_batch_size)
    raise ValueError(f"policy must be 'static' or 'greedy', got {name!r}")
