"""Writing encoded results and letting go of their leases: in one call where one server has both, else in two steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import redis
from celery.backends.redis import RedisBackend
from celery.utils.log import get_logger
from kombu.utils.encoding import bytes_to_str

from ..tasks.registry import backend_key
from ..tasks.scripts import Script
from .acks import Acks, tags_of
from .leases import Leases
from .request import Call
from .results import ResultEncoder, Write

logger = get_logger(__name__)

# From the server, these will pass; its other errors are about what it was sent.
PASSING = (redis.ConnectionError, redis.TimeoutError, redis.OutOfMemoryError, redis.ReadOnlyError)
# A server closes the connection on a value beyond its limit, proto-max-bulk-len, which is no less than this.
MAY_BE_TOO_LARGE_BYTES = 1024 * 1024
# While a script runs nobody else is served: a large result travels in a call of its own.
_MAX_CALL_BYTES = 1024 * 1024

SETTLED_MARKER_S = 300
"""How long it is remembered that a call is done which stores no result."""

# KEYS: the unacked hash. ARGV: the number of the backend's database, or "" where the broker's is the same; that of the
# broker's; the smallest of all tags; then for every call how many tags it has, the tags, "1" to let go of them, the
# result's key or "", its lifetime in seconds or 0, the result.
# Replies for every call: 1 done, 0 no longer held, 2 a stored result cannot be read, or the error of the server.
_SETTLE = Script("""
local function is_final(stored)
    local readable, meta = pcall(cjson.decode, stored)
    if not readable or type(meta) ~= 'table' then return nil end
    return meta.status == 'SUCCESS' or meta.status == 'FAILURE' or meta.status == 'REVOKED'
end

local function set(key, lifetime, meta, ...)
    if lifetime == '0' then return redis.pcall('SET', key, meta, ...) end
    return redis.pcall('SET', key, meta, 'EX', lifetime, ...)
end

local function store(key, lifetime, meta)
    local reply = set(key, lifetime, meta, 'NX')
    if not reply then
        local final = is_final(redis.call('GET', key))
        if final == nil then return 2 end
        if final then return 1 end
        reply = set(key, lifetime, meta)
    end
    if reply.err then return reply.err end
    redis.call('PUBLISH', key, meta)
    return 1
end

-- First who is held, as the hash is in the broker's database; then the results, in the backend's; then let go.
-- A lease is lost for all that it covers at once, and tags only grow: whoever has the oldest has them all.
local calls, at = {}, 4
local has_all = redis.call('HEXISTS', KEYS[1], ARGV[3]) == 1
while at <= #ARGV do
    local count = tonumber(ARGV[at])
    local call = {first = at + 1, last = at + count, held = has_all, at = at + count + 1}
    for tag = call.first, call.last do
        call.held = call.held or redis.call('HEXISTS', KEYS[1], ARGV[tag]) == 1
    end
    calls[#calls + 1] = call
    at = call.at + 4
end
local replies = {}
if ARGV[1] ~= '' then redis.call('SELECT', ARGV[1]) end
for index, call in ipairs(calls) do
    local key = ARGV[call.at + 1]
    if not call.held then
        replies[index] = 0
    elseif key == '' then
        replies[index] = 1
    else
        replies[index] = store(key, ARGV[call.at + 2], ARGV[call.at + 3])
    end
end
if ARGV[1] ~= '' then redis.call('SELECT', ARGV[2]) end
local gone = {}
for index, call in ipairs(calls) do
    if replies[index] == 1 and ARGV[call.at] == '1' then
        for tag = call.first, call.last do gone[#gone + 1] = ARGV[tag] end
    end
end
for first = 1, #gone, 1000 do
    redis.call('HDEL', KEYS[1], unpack(gone, first, math.min(first + 999, #gone)))
end
return replies
""")


class Refused(Exception):
    """The server takes everything but this one result."""


Verdict = bool | Refused
"""Of one write: it is stored, or stands already; it is not ours any more; it cannot be stored."""


class Store(Protocol):
    """Stores results and lets go of their calls. Errors of a server that is away propagate."""

    def store(self, writes: Sequence[Write], *, release: bool = True) -> list[Verdict]: ...


class OneCallStore:
    """Results, their guard, their publishing and the leases in one atomic call of the server that has them all."""

    def __init__(self, backend: RedisBackend, encoder: ResultEncoder, leases: Leases) -> None:
        self._backend = backend
        self._encoder = encoder
        self._leases = leases
        database = backend.client.connection_pool.connection_kwargs.get("db", 0)
        broker_database = leases.client.connection_pool.connection_kwargs.get("db", 0)
        self._header = ["" if database == broker_database else database, broker_database]

    def store(self, writes: Sequence[Write], *, release: bool = True) -> list[Verdict]:
        return [verdict for chunk in _chunks(writes) for verdict in self._store(chunk, release)]

    def _store(self, writes: list[Write], release: bool) -> list[Verdict]:
        tags_of_all = [tags_of([write.call]) for write in writes]
        arguments: list[Any] = [*self._header, min(map(min, tags_of_all))]
        for write, tags in zip(writes, tags_of_all, strict=True):
            arguments += (len(tags), *tags, int(release), write.key, write.lifetime_s or 0, write.meta or b"")
        sent_before = [write.call.was_sent for write in writes]
        if release:
            for write in writes:
                write.call.was_sent = True
        try:
            replies = _SETTLE(self._leases.client, [self._leases.unacked_key], arguments)
        except PASSING as error:
            if len(writes) > 1 or len(writes[0].meta or b"") < MAY_BE_TOO_LARGE_BYTES:
                raise
            return [_too_large(writes[0], error)]
        verdicts = [
            self._verdict(write, reply, sent, release)
            for write, reply, sent in zip(writes, replies, sent_before, strict=True)
        ]
        if release:
            for tags, verdict in zip(tags_of_all, verdicts, strict=True):
                if verdict is True:
                    self._leases.tags.difference_update(tags)
        return verdicts

    def _verdict(self, write: Write, reply: int | bytes, was_sent: bool, release: bool) -> Verdict:
        if isinstance(reply, bytes):
            return Refused(f"Redis refuses the result of {len(write.meta or b'')} bytes: {bytes_to_str(reply)}")
        if reply == 2:
            logger.warning("busload: overwriting a stored result that cannot be read")
            self._backend.client.delete(write.key)
            return self._store([write], release)[0]
        # What the server had carried out before the connection was cut is not held any more.
        return reply == 1 or was_sent


class TwoStepStore:
    """Results first, then the leases or kombu's messages: for a broker and a backend that are two servers."""

    def __init__(self, backend: RedisBackend, encoder: ResultEncoder, acks: Acks) -> None:
        self._backend = backend
        self._encoder = encoder
        self._acks = acks

    def store(self, writes: Sequence[Write], *, release: bool = True) -> list[Verdict]:
        # What an earlier try has released is done.
        left = [write for write in writes if not write.call.was_sent]
        ours = {call.id for call in self._acks.still_ours([write.call for write in left])}
        held = [write for write in left if write.call.id in ours]
        # A final state stays final, whoever stored it.
        final = self.final([write.call for write in held])
        verdicts = self._send_all([write for write in held if write.call.id not in final])
        if release:
            done = [write.call for write in held if verdicts.get(write.call.id, True) is True]
            self._acks.release(done)
            for call in done:
                call.was_sent = True
        return [
            verdicts.get(write.call.id, True) if write.call.id in ours or write.call.was_sent else False
            for write in writes
        ]

    def final(self, calls: list[Call]) -> set[str]:
        """Return the ids of calls whose outcome is there."""
        if not calls:
            return set()
        stored = self._backend.client.mget([self._record(call) for call in calls])
        return {call.id for call, value in zip(calls, stored, strict=True) if self._is_final(call, value)}

    def _record(self, call: Call) -> str | bytes:
        key: str | bytes = self._marker(call) if call.ignore_result else self._backend.get_key_for_task(call.id)
        return key

    def _marker(self, call: Call) -> str:
        return backend_key(self._backend, f"settled:{call.id}")

    def _is_final(self, call: Call, value: bytes | None) -> bool:
        if value is None or call.ignore_result:
            return value is not None
        try:
            return self._encoder.is_final(value)
        except Exception:  # noqa: BLE001  whatever a serializer raises
            logger.warning("busload: overwriting a stored result that cannot be read")
            return False

    def _send_all(self, writes: list[Write]) -> dict[str, Verdict]:
        """Store all of them, or one by one what can be: a result that the server refuses fails its own call."""
        try:
            self._send(writes)
            return {}
        except PASSING:
            if not any(len(write.meta or b"") >= MAY_BE_TOO_LARGE_BYTES for write in writes):
                raise
        except redis.RedisError:
            logger.warning("busload: a batch of results was refused; storing them one by one", exc_info=True)
        return {write.call.id: self._send_alone(write) for write in writes}

    def _send_alone(self, write: Write) -> Verdict:
        try:
            self._send([write])
        except PASSING as error:
            if len(write.meta or b"") < MAY_BE_TOO_LARGE_BYTES:
                raise
            return _too_large(write, error)
        except redis.RedisError as error:
            return _too_large(write, error)
        return True

    def _send(self, writes: Sequence[Write]) -> None:
        if not writes:
            return
        with self._backend.client.pipeline(transaction=False) as pipe:
            for write in writes:
                if write.meta is None:
                    pipe.set(self._marker(write.call), b"", ex=SETTLED_MARKER_S)
                else:
                    pipe.set(write.key, write.meta, ex=write.lifetime_s)
                    pipe.publish(write.key, write.meta)
            pipe.execute()


def is_one_server(backend: RedisBackend, broker: redis.Redis) -> bool:
    """Whether backend and broker are the same server for the same user, as far as their addresses tell."""
    places = [_place(client.connection_pool) for client in (backend.client, broker)]
    return places[0] == places[1]


def _place(pool: Any) -> tuple[Any, ...]:
    settings = pool.connection_kwargs
    user = settings.get("username") or "default", settings.get("password")
    if hasattr(pool, "service_name"):
        watchers = [client.connection_pool.connection_kwargs for client in pool.sentinel_manager.sentinels]
        return pool.service_name, frozenset((one["host"], one["port"]) for one in watchers), *user
    return settings.get("path"), settings.get("host"), settings.get("port"), *user


def _chunks(writes: Sequence[Write]) -> Iterator[list[Write]]:
    chunk: list[Write] = []
    size = 0
    for write in writes:
        bytes_more = len(write.meta or b"")
        if chunk and size + bytes_more > _MAX_CALL_BYTES:
            yield chunk
            chunk, size = [], 0
        chunk.append(write)
        size += bytes_more
    if chunk:
        yield chunk


def _too_large(write: Write, error: redis.RedisError) -> Refused:
    return Refused(f"Redis refuses the result of {len(write.meta or b'')} bytes: {error}")
