"""How long batches run and how long the next one takes to fetch, so that it is there just in time."""

from __future__ import annotations

import math
from collections.abc import Hashable

_WEIGHT = 0.3  # of the newest measurement
_MARGIN_S = 0.003


class Pace:
    """Averages of what was measured, newer ones weighing more. All times in seconds."""

    def __init__(self) -> None:
        self._runs_s: dict[Hashable, float] = {}
        self._steps_s: dict[str, float] = {}

    def ran(self, kind: Hashable, run_s: float) -> None:
        """Note how long a batch of ``kind`` was in the model."""
        self._runs_s[kind] = _mean(self._runs_s.get(kind, run_s), run_s)

    def stepped(self, step: str, step_s: float) -> None:
        """Note how long one of the steps took that lead to a batch which is ready to run."""
        self._steps_s[step] = _mean(self._steps_s.get(step, step_s), step_s)

    def fetch_window(self, kind: Hashable, began_at: float) -> tuple[float, float] | None:
        """Return from when until when the batch after the one that began at ``began_at`` should be fetched.

        None while nothing is known of batches of this kind. A batch that runs far longer than others did is stuck
        for all that is known, and what waits is better left to other workers.
        """
        run_s = self._runs_s.get(kind)
        if run_s is None:
            return None
        return began_at + run_s - self._lead_s, began_at + run_s + max(run_s, self._lead_s)

    def batches_ahead(self, kind: Hashable) -> int:
        """Return how many full batches of ``kind`` to have ready: two where fetching one takes longer than a run."""
        return 2 if self._runs_s.get(kind, math.inf) < self._lead_s else 1

    @property
    def _lead_s(self) -> float:
        return 2 * sum(self._steps_s.values()) + _MARGIN_S


def _mean(before: float, newest: float) -> float:
    return before + _WEIGHT * (newest - before)
