"""Who holds which message: the keys in the broker's Redis, and how what a dead worker held gets back to its queue.

A worker moves messages from a queue's lists into a hash of its own. That hash is held under one lease, which the
worker renews; the lease belongs to one *incarnation* of a worker, a name that is new at every start. Workers, API
processes and supervisors find leases that have run out and push what they cover back onto the lists it came from,
byte for byte, in its order.

==============================  ===========================================================================
``busload:1:leases``            sorted set: incarnation, by the time at which its lease ends, in milliseconds
                                since the epoch by the server's clock
``busload:1:unacked:NAME``      hash of incarnation NAME: tag to message, which is prefixed with its list's key
``busload:1:drained``           hash: key of a list to how many messages were moved from it, less those pushed back
``busload:1:tag``               the last tag given to a delivery
==============================  ===========================================================================
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import redis
from celery import Celery
from celery.utils.log import get_logger
from kombu.transport.redis import Channel
from redis.backoff import NoBackoff
from redis.retry import Retry

from .scripts import Script

logger = get_logger(__name__)

FORMAT_VERSION = 1

LEASE_S = 15.0
RENEW_S = 5.0
"""How often a lease is renewed, and how often leases that have run out are looked for."""

# Functions that several scripts share. A held message is the length of its list's key, ":", that key, the message.
LIBRARY = """
local function now_ms()
    local now = redis.call('TIME')
    return tonumber(now[1]) * 1000 + math.floor(tonumber(now[2]) / 1000)
end

local function read(held)
    local colon = string.find(held, ':', 1, true)
    local after = colon + tonumber(string.sub(held, 1, colon - 1)) + 1
    return string.sub(held, colon + 1, after - 1), string.sub(held, after)
end

local function give_back(unacked, drained, tags)
    -- Workers take from the right end: what is pushed there last is taken first.
    local given = 0
    for index = #tags, 1, -1 do
        local held = redis.call('HGET', unacked, tags[index])
        if held then
            local list, message = read(held)
            redis.call('RPUSH', list, message)
            redis.call('HINCRBY', drained, list, -1)
            redis.call('HDEL', unacked, tags[index])
            given = given + 1
        end
    end
    return given
end

local function take_back(leases, unacked, drained, incarnation)
    local tags = redis.call('HKEYS', unacked)
    table.sort(tags, function(left, right) return tonumber(left) < tonumber(right) end)
    local given = give_back(unacked, drained, tags)
    redis.call('ZREM', leases, incarnation)
    return given
end
"""

# KEYS: leases, drained, the unacked hash of the incarnation. ARGV: the incarnation.
_TAKE_BACK = Script(LIBRARY + "return take_back(KEYS[1], KEYS[3], KEYS[2], ARGV[1])")

# KEYS: leases, drained, what the keys of unacked hashes begin with.
# Of many at once it takes a few at a time, so that no call is long.
_SWEEP = Script(
    LIBRARY
    + """
local swept = {}
for _, incarnation in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now_ms(), 'LIMIT', 0, 8)) do
    swept[#swept + 1] = incarnation
    swept[#swept + 1] = take_back(KEYS[1], KEYS[3] .. incarnation, KEYS[2], incarnation)
end
return swept
"""
)

# KEYS: leases, what the keys of unacked hashes begin with.
_HOLDERS = Script(
    LIBRARY
    + """
local holders, now = {}, now_ms()
local leases = redis.call('ZRANGE', KEYS[1], 0, -1, 'WITHSCORES')
for index = 1, #leases, 2 do
    holders[#holders + 1] = {
        leases[index], redis.call('HLEN', KEYS[2] .. leases[index]), tonumber(leases[index + 1]) - now
    }
end
return holders
"""
)


@dataclass(frozen=True)
class Keys:
    """The keys of one broker, with the application's prefix before each."""

    prefix: str

    @property
    def leases(self) -> str:
        return f"{self.prefix}busload:{FORMAT_VERSION}:leases"

    @property
    def drained(self) -> str:
        return f"{self.prefix}busload:{FORMAT_VERSION}:drained"

    @property
    def tag(self) -> str:
        return f"{self.prefix}busload:{FORMAT_VERSION}:tag"

    def unacked(self, incarnation: str) -> str:
        return f"{self.prefix}busload:{FORMAT_VERSION}:unacked:{incarnation}"


@dataclass(frozen=True)
class Holder:
    """An incarnation of a worker that holds a lease."""

    incarnation: str
    messages: int
    ends_in_s: float
    """Negative once the lease has run out."""


class LeaseBook:
    """All leases of one broker, as those see them who hold none. Redis errors propagate."""

    def __init__(self, client: redis.Redis, prefix: str) -> None:
        self.client = client
        self.keys = Keys(prefix)

    @classmethod
    def of(cls, app: Celery, timeout_s: float = 5.0) -> LeaseBook:
        """Return that of the application's broker, which must be Redis and there."""
        with app.connection_for_write() as connection:
            channel = connection.default_channel
            return cls(broker_client(channel, timeout_s), channel.global_keyprefix)

    def holders(self) -> list[Holder]:
        """Return who holds a lease, the one that ends first before others."""
        found = _HOLDERS(self.client, [self.keys.leases, self.keys.unacked("")])
        return [Holder(name.decode(), messages, ends_in_ms / 1000) for name, messages, ends_in_ms in found]

    def sweep(self) -> dict[str, int]:
        """Give back what leases that have run out cover: how many messages, by incarnation."""
        found: dict[str, int] = {}
        while swept := _SWEEP(self.client, [self.keys.leases, self.keys.drained, self.keys.unacked("")]):
            found |= {name.decode(): messages for name, messages in pairs(swept)}
        return found

    def take_back(self, incarnation: str) -> int:
        """Give back what an incarnation holds, of which the caller knows that it is dead; return how much."""
        keys = [self.keys.leases, self.keys.drained, self.keys.unacked(incarnation)]
        return int(_TAKE_BACK(self.client, keys, [incarnation]))


class Sweeper:
    """Looks again and again for leases that have run out.

    It takes nothing the first time, nor the first time after a pause: when a server has been away, its workers could
    not renew their leases, and get the time to do so.
    """

    def __init__(self, book: LeaseBook, clock: Callable[[], float] = time.monotonic) -> None:
        self._book = book
        self._clock = clock
        self._answered_at = -math.inf

    def sweep(self) -> None:
        """Sweep once; to be called every RENEW_S seconds. Redis errors propagate."""
        if self._clock() - self._answered_at > 2 * RENEW_S:
            self._book.holders()
        else:
            for incarnation, messages in self._book.sweep().items():
                logger.warning("busload: the lease of %s ran out; %d messages went back", incarnation, messages)
        self._answered_at = self._clock()


def broker_client(channel: Channel, timeout_s: float) -> redis.Redis:
    """Return a client of its own for the Redis behind ``channel``: same address, credentials, TLS and Sentinel.

    A command is sent once: one whose reply was lost may have been carried out. A server that does not answer within
    ``timeout_s`` counts as away, unless the application has chosen a ``socket_timeout``.
    """
    pool = channel._get_pool()
    settings = pool.connection_kwargs
    settings["retry"] = Retry(NoBackoff(), 0)
    if settings.get("socket_timeout") is None:
        settings["socket_timeout"] = timeout_s
    return redis.Redis(connection_pool=pool)


def pairs(flat: Sequence[Any]) -> list[tuple[Any, Any]]:
    """Return what a script replies in turns as pairs."""
    return list(zip(flat[::2], flat[1::2], strict=True))
