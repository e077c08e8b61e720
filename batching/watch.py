"""What successive looks at a queue tell: how long its oldest message has waited, how fast messages come."""

from __future__ import annotations

from collections import deque

# Looks come at least so far apart, and at most as far as the wait has already been long: few for a lone message,
# yet a sudden crowd is seen soon.
LEAST_LOOK_S = 0.001


class QueueWatch:
    """Follows one queue from which any number of workers drain.

    ``depth`` is how many messages wait in it, ``drained`` how many were ever taken from it; together they number
    the messages in the order of their arrival. Times are seconds on one clock of the caller's.
    """

    def __init__(self) -> None:
        self.depth = 0
        self.drained = 0
        self._looks: deque[tuple[int, float]] = deque()
        """How many messages had ever come at each look, from the last look that missed the oldest one on."""

    def see(self, depth: int, drained: int, now: float) -> None:
        """Note one look at the queue."""
        arrived = depth + drained
        if self._looks and arrived < self._looks[-1][0]:
            # Somebody takes without counting: stock workers. What is left is at least as young as that look.
            self._looks.clear()
        self.depth, self.drained = depth, drained
        if not self._looks or arrived > self._looks[-1][0]:
            self._looks.append((arrived, now))
        while self._looks and self._looks[0][0] <= drained:
            self._looks.popleft()

    @property
    def oldest_at(self) -> float:
        """When the message that is next was first seen here; only while ``depth`` is not 0."""
        return self._looks[0][1]

    def look_again_in_s(self, full: int, now: float) -> float:
        """Return in how many seconds the queue may hold ``full`` messages."""
        age_s = now - self.oldest_at
        came = self._looks[-1][0] - self._looks[0][0]
        until_full_s = age_s * (full - self.depth) / came if came else age_s
        return max(LEAST_LOOK_S, min(age_s, until_full_s))
