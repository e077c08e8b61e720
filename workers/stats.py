"""What a worker has done, by task: the answer to the remote control command ``batches``."""

from __future__ import annotations

import threading
from dataclasses import asdict, dataclass


@dataclass(slots=True)
class TaskStats:
    """Totals of one task since the worker started."""

    batches: int = 0
    items: int = 0
    failed: int = 0
    run_s: float = 0.0
    """Seconds that the runner spent inside the function or model."""


class BatchStats:
    """Totals of every task, counted on the runner's thread and read on others."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_task: dict[str, TaskStats] = {}

    def count(self, task: str, items: int, failed: int, run_s: float) -> None:
        with self._lock:
            stats = self._by_task.setdefault(task, TaskStats())
            stats.batches += 1
            stats.items += items
            stats.failed += failed
            stats.run_s += run_s

    def snapshot(self) -> dict[str, dict[str, float]]:
        with self._lock:
            return {task: asdict(stats) for task, stats in self._by_task.items()}
