"""Results as Celery's Redis backend stores them, encoded."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import msgspec
from celery import states
from celery.backends.redis import RedisBackend
from kombu.utils.encoding import safe_repr

from ..batching import Failed, Outcome, ResultEncodeError, Succeeded
from .request import Call

_PLAIN = frozenset((str, int, bool, type(None)))
# What these make of a result, with the code of RedisBackend, is known.
_ENCODES = ("encode", "_encode", "encode_result", "prepare_value", "_get_result_meta", "current_task_children")


@dataclass(slots=True)
class Write:
    """What is to be stored for one call: nothing, when ``meta`` is None."""

    call: Call
    outcome: Outcome
    key: str = ""
    meta: bytes | None = None
    lifetime_s: int | None = None


class ResultEncoder:
    """Encodes outcomes for one backend. The usual ones by msgspec, the others by the backend itself."""

    def __init__(self, backend: RedisBackend) -> None:
        self._backend = backend
        self._encoder = msgspec.json.Encoder()
        self._key_prefix = _text(backend.get_key_for_task("id"))[:-2]
        extended = backend.app.conf.find_value_for_key("extended", "result")
        as_celery = all(getattr(type(backend), name) is getattr(RedisBackend, name) for name in _ENCODES)
        self._is_plain = backend.serializer == "json" and not backend.compression and not extended and as_celery

    def encode(self, settled: list[tuple[Call, Outcome]]) -> list[Write]:
        """Return what to store for each call; an outcome that cannot be encoded becomes a failure."""
        date_done = self._backend.app.now().isoformat()
        return [self._write(call, outcome, date_done) for call, outcome in settled]

    def instead(self, call: Call, refusal: str) -> Write:
        """Return what to store for a call whose result was refused by the server."""
        return self._write(call, Failed.from_error(ResultEncodeError(refusal)), self._backend.app.now().isoformat())

    def started(self, call: Call, pid: int, hostname: str) -> Write:
        """Return what to store while a call runs."""
        result = {"pid": pid, "hostname": hostname}
        meta = self._meta(call, result, states.STARTED, None, call.request._context)
        return Write(call, Succeeded(result), self._key(call), meta, self._lifetime_s(call, self._backend.expires))

    def is_final(self, meta: bytes) -> bool:
        """Whether a stored result is the last word. Raises whatever a serializer raises."""
        return self._backend.decode_result(meta).get("status") in states.READY_STATES

    def _write(self, call: Call, outcome: Outcome, date_done: str) -> Write:
        if isinstance(outcome, Failed):
            if not call.stores_errors:
                return Write(call, outcome)
            return self._failure(call, outcome, call.request._context)
        if call.ignore_result:
            return Write(call, outcome)
        meta = self._plain_success(call, outcome.value, date_done) if self._is_plain else None
        if meta is None:
            try:
                meta = self._meta(call, outcome.value, states.SUCCESS, None, call.request._context)
            except Exception as error:  # noqa: BLE001  whatever a serializer raises: only this call fails
                refusal = ResultEncodeError(f"the result cannot be stored: {safe_repr(error)}")
                return self._failure(call, Failed.from_error(refusal), None)
        return Write(call, outcome, self._key(call), meta, self._lifetime_s(call, self._backend.expires))

    def _failure(self, call: Call, outcome: Failed, context: Any) -> Write:
        try:
            meta = self._meta(call, outcome.error, states.FAILURE, outcome.traceback, context)
        except Exception as error:  # noqa: BLE001  as above
            refusal = ResultEncodeError(f"the error cannot be stored: {safe_repr(error)}")
            outcome = Failed.from_error(refusal)
            # Without the request, whose arguments may be what does not fit.
            meta = self._meta(call, outcome.error, states.FAILURE, outcome.traceback, None)
        return Write(call, outcome, self._key(call), meta, self._lifetime_s(call, self._backend.failure_expires))

    def _plain_success(self, call: Call, value: Any, date_done: str) -> bytes | None:
        if not is_plain_json(value):
            return None
        meta = {
            "status": states.SUCCESS,
            "result": value,
            "traceback": None,
            "children": [],
            "date_done": date_done,
        }
        if call.group:
            meta["group_id"] = call.group
        if call.parent_id:
            meta["parent_id"] = call.parent_id
        meta["task_id"] = call.id
        try:
            return self._encoder.encode(meta)
        except (UnicodeError, OverflowError):  # lone surrogates, very large numbers: kombu writes them
            return None

    def _meta(self, call: Call, result: Any, state: str, traceback: str | None, context: Any) -> bytes:
        meta = self._backend._get_result_meta(
            result=self._backend.encode_result(result, state), state=state, traceback=traceback, request=context
        )
        meta["task_id"] = call.id
        encoded: bytes | str = self._backend.encode(meta)
        return encoded.encode() if isinstance(encoded, str) else encoded

    def _key(self, call: Call) -> str:
        return self._key_prefix + call.id

    def _lifetime_s(self, call: Call, usual_s: int | None) -> int | None:
        own_s = call.task.result_ttl_s
        return (usual_s if own_s is None else own_s) or None


def _text(key: bytes | str) -> str:
    return key.decode() if isinstance(key, bytes) else key


def is_plain_json(value: Any) -> bool:
    """Whether a value means the same to every JSON encoder: exact types of JSON's own, finite numbers, string keys."""
    kind = type(value)
    if kind is float:
        return math.isfinite(value)
    if kind is list or kind is tuple:
        kinds = set(map(type, value))
        if kinds == {float}:
            return math.isfinite(sum(value))
        return kinds <= _PLAIN or all(map(is_plain_json, value))
    if kind is dict:
        return all(type(key) is str for key in value) and all(map(is_plain_json, value.values()))
    return kind in _PLAIN
