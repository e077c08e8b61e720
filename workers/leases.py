"""The messages that this worker holds: moved from their lists in one call, kept under one lease, let go in one call."""

from __future__ import annotations

import os
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Sequence

import redis
from celery.utils.log import get_logger

from ..tasks.leases import LEASE_S, LIBRARY, RENEW_S, Keys, LeaseBook, Sweeper
from ..tasks.scripts import Script
from . import crashes

logger = get_logger(__name__)

INCARNATION_VARIABLE = "BUSLOAD_INCARNATION"
"""Environment variable by which a supervisor names each worker process that it starts."""

MAX_BYTES = 8 * 1024 * 1024
"""Of one move; what is left comes with the next."""
_MAX_MESSAGES = 1000
# Before the lease ends there is time for several.
_RENEW_AGAIN_S = 0.5

# KEYS: leases, unacked, drained, tag, then the lists of one queue, most urgent first.
# ARGV: the incarnation, the lease in ms, how many messages and bytes at most; then what the caller saw when it made up
# its mind: the count of drained messages, and the depth from which that does not matter, for a batch is full.
# Returns depth and drained count as they are then, the first tag, and the messages.
_MOVE = Script(
    LIBRARY
    + """
local depth, drained = 0, 0
for list = 5, #KEYS do
    depth = depth + redis.call('LLEN', KEYS[list])
    drained = drained + tonumber(redis.call('HGET', KEYS[3], KEYS[list]) or 0)
end
if depth == 0 or (drained ~= tonumber(ARGV[5]) and depth < tonumber(ARGV[6])) then
    return {depth, drained, 0}
end
local texts, held, bytes, wanted = {}, {}, 0, math.min(depth, tonumber(ARGV[3]))
local tag = redis.call('INCRBY', KEYS[4], wanted) - wanted
for list = 5, #KEYS do
    local prefix, taken = #KEYS[list] .. ':' .. KEYS[list], 0
    while #texts < wanted and bytes < tonumber(ARGV[4]) do
        -- In handfuls that double, so that large messages are noticed before many of them are taken.
        local handful = redis.call('RPOP', KEYS[list], math.min(#texts + 1, wanted - #texts))
        if not handful then break end
        for _, text in ipairs(handful) do
            texts[#texts + 1] = text
            held[#held + 1] = tag + #texts
            held[#held + 1] = prefix .. text
            bytes, taken = bytes + #text, taken + 1
        end
    end
    if taken > 0 then redis.call('HINCRBY', KEYS[3], KEYS[list], taken) end
end
for first = 1, #held, 1000 do
    redis.call('HSET', KEYS[2], unpack(held, first, math.min(first + 999, #held)))
end
redis.call('ZADD', KEYS[1], now_ms() + tonumber(ARGV[2]), ARGV[1])
return {depth - #texts, drained + #texts, tag + 1, unpack(texts)}
"""
)

# KEYS: leases. ARGV: the incarnation, the lease in ms. Returns whether there is a lease.
_RENEW = Script(
    LIBRARY
    + """
if not redis.call('ZSCORE', KEYS[1], ARGV[1]) then return 0 end
redis.call('ZADD', KEYS[1], now_ms() + tonumber(ARGV[2]), ARGV[1])
return 1
"""
)

# KEYS: unacked, drained. ARGV: tags, oldest first.
_HAND_BACK = Script(LIBRARY + "return give_back(KEYS[1], KEYS[2], ARGV)")


class Leases:
    """What one incarnation of a worker holds on the broker. Redis errors propagate.

    Every message has a tag, new for each delivery. A tag that ran out or was taken back does nothing any more.
    """

    def __init__(
        self,
        client: redis.Redis,
        prefix: str,
        incarnation: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.client = client
        self.keys = Keys(prefix)
        self.incarnation = incarnation
        self.unacked_key = self.keys.unacked(incarnation)
        self.tags: set[int] = set()
        """Of the messages that we know to hold. Each operation on it is atomic."""
        self.lost: set[int] = set()
        """Tags that ran out while we thought that we held them."""
        self.in_doubt = False
        """Whether the broker may hold messages for us of which we do not know, or not those any more which we do."""
        self._clock = clock
        self._renewed_at = clock()

    def move(
        self, lists: Sequence[str], *, at_most: int, seen_drained: int, full_depth: int
    ) -> tuple[int, int, list[tuple[int, bytes]]]:
        """Take messages from the lists of one queue: the depth and drained count now, tags and messages.

        Nothing is taken when others have drained since the caller looked, unless ``full_depth`` messages wait.
        """
        keys = [self.keys.leases, self.unacked_key, self.keys.drained, self.keys.tag, *lists]
        at_most = min(at_most, _MAX_MESSAGES)
        arguments = [self.incarnation, int(LEASE_S * 1000), at_most, MAX_BYTES, seen_drained, full_depth]
        asked_at = self._clock()
        try:
            depth, drained, first, *texts = _MOVE(self.client, keys, arguments)
        except redis.RedisError:
            self.in_doubt = True
            raise
        messages = list(enumerate(texts, first))
        if messages:
            self._renewed(asked_at)
            self.tags.update(tag for tag, _ in messages)
        return depth, drained, messages

    def renew(self) -> None:
        """Let the lease begin anew."""
        asked_at = self._clock()
        if _RENEW(self.client, [self.keys.leases], [self.incarnation, int(LEASE_S * 1000)]):
            self._renewed(asked_at)
        elif self.tags:
            self.in_doubt = True

    def reconcile(self) -> list[tuple[int, bytes]]:
        """Compare what we know with what the broker has, forget what is not ours, and return what we did not know."""
        known = set(self.tags)
        self.in_doubt = False
        try:
            held = self._held()
        except redis.RedisError:
            self.in_doubt = True
            raise
        if lost := known - held.keys():
            self.tags -= lost
            self.lost |= lost
            logger.warning("busload: the lease of %d calls ran out; they are no longer ours", len(lost))
        found = [(tag, held[tag]) for tag in sorted(held.keys() - known)]
        self.tags.update(tag for tag, _ in found)
        return found

    def has_lapsed(self) -> bool:
        """Whether others may have what we hold, for all that we know: the lease was not renewed in time."""
        return self.in_doubt or self._clock() - self._renewed_at > LEASE_S

    def still_held(self, tags: Iterable[int]) -> set[int]:
        """Return those of ``tags`` that the broker has for us."""
        asked = list(tags)
        values = self.client.hmget(self.unacked_key, list(map(str, asked))) if asked else []
        return {tag for tag, value in zip(asked, values, strict=True) if value is not None}

    def release(self, tags: Iterable[int]) -> None:
        """Forget messages that are done with."""
        done = list(tags)
        if done:
            self.client.hdel(self.unacked_key, *map(str, done))
            self.tags.difference_update(done)

    def hand_back(self, tags: Iterable[int]) -> None:
        """Push messages back, unchanged, so that the oldest is taken first."""
        back = sorted(tags)
        if back:
            _HAND_BACK(self.client, [self.unacked_key, self.keys.drained], back)
            self.tags.difference_update(back)

    def end(self) -> None:
        """Push back whatever is still held, and give up the lease."""
        LeaseBook(self.client, self.keys.prefix).take_back(self.incarnation)
        self.tags.clear()

    def _held(self) -> dict[int, bytes]:
        found: dict[int, bytes] = {}
        stored: dict[bytes, bytes] = self.client.hgetall(self.unacked_key)  # type: ignore[assignment]
        for tag, held in stored.items():
            length, _, rest = held.partition(b":")
            found[int(tag)] = rest[int(length) :]
        return found

    def _renewed(self, asked_at: float) -> None:
        if asked_at - self._renewed_at > LEASE_S and self.tags:
            self.in_doubt = True
        self._renewed_at = asked_at


class LeaseKeeper:
    """Renews the lease of this worker and sweeps those that ran out, on a thread of its own.

    ``lost_touch`` is called when what we hold may not be ours any more.
    """

    def __init__(self, leases: Leases, lost_touch: Callable[[], None]) -> None:
        self._leases = leases
        self._lost_touch = lost_touch
        self._sweeper = Sweeper(LeaseBook(leases.client, leases.keys.prefix))
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=crashes.guard(self._keep), name="busload-leases", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()

    def _keep(self) -> None:
        wait_s = RENEW_S
        while not self._stopped.wait(wait_s):
            try:
                self._leases.renew()
                self._sweeper.sweep()
                wait_s = RENEW_S
            except redis.RedisError as error:
                logger.warning("busload: the lease was not renewed, trying again: %r", error)
                wait_s = _RENEW_AGAIN_S
            if self._leases.in_doubt:
                self._lost_touch()


def new_incarnation(hostname: str) -> str:
    """Return the name that the supervisor has given to this start of the worker, or else one that nobody has had."""
    return os.environ.get(INCARNATION_VARIABLE) or f"{hostname}/{uuid.uuid4().hex}"
