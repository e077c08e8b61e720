"""Reads what Celery stores of a task as plain data.

Nothing stored is imported, called or raised: a record is what anyone who can write to Redis says it is.
"""

from __future__ import annotations

import base64
import json
import lzma
import math
import zlib
from collections.abc import Mapping
from datetime import date, time
from decimal import Decimal
from typing import Any
from uuid import UUID

from celery import states
from celery.backends.redis import RedisBackend
from kombu.exceptions import ContentDisallowed, DecodeError

MAX_MESSAGE_CHARS = 2000
MAX_TYPE_CHARS = 200

_ERROR_CODES = {states.FAILURE: "task_failed", states.REVOKED: "task_revoked"}
_UNFINISHED = (states.PENDING, states.STARTED, states.RETRY)

# Kombu wraps what its decoders of JSON raise, but not what its decompressors do.
_UNREADABLE = (
    *(DecodeError, ContentDisallowed),
    *(zlib.error, lzma.LZMAError, OSError, EOFError),
    *(KeyError, TypeError, ValueError, RecursionError),
)


def pending_json(task_id: str) -> str:
    """Return the JSON answer for a call that has no record yet."""
    return _compact({"id": task_id, "state": states.PENDING, "result": None})


def record_json(task_id: str, stored: bytes, backend: RedisBackend) -> str:
    """Return the JSON answer for a call from its stored record, however broken that is."""
    try:
        record = backend.decode(stored)
        return _dumps(_describe(task_id, record))
    except _UNREADABLE as why:
        return _dumps(_unreadable(task_id, why))


def _describe(task_id: str, record: Mapping[str, Any]) -> dict[str, Any]:
    state, result = record["status"], record["result"]
    if state in _ERROR_CODES:
        return {"id": task_id, "state": state, "error": _error(_ERROR_CODES[state], result)}
    if state == states.SUCCESS:
        return {"id": task_id, "state": state, "result": result}
    # States of the task's own making, such as PROGRESS, are set while it runs.
    return {"id": task_id, "state": state if state in _UNFINISHED else states.STARTED, "result": None}


def _error(code: str, exception: Any) -> dict[str, str]:
    """Describe an exception that Celery stored as ``{"exc_type", "exc_message", "exc_module"}``."""
    kind: Any = exception
    message: Any = ""
    if isinstance(exception, Mapping):
        kind, message = exception.get("exc_type"), exception.get("exc_message", "")
    if isinstance(message, list):
        message = ", ".join(map(str, message))
    return {"code": code, "type": str(kind)[:MAX_TYPE_CHARS], "message": str(message)[:MAX_MESSAGE_CHARS]}


def _unreadable(task_id: str, why: Exception) -> dict[str, Any]:
    error = {
        "code": "result_unreadable",
        "type": type(why).__name__,
        "message": "The stored record of this task is not JSON that Celery wrote.",
    }
    return {"id": task_id, "state": states.FAILURE, "error": error}


def _dumps(body: dict[str, Any]) -> str:
    try:
        return _compact(body)
    except (TypeError, ValueError):
        # A type that kombu's JSON restores, or a float that JSON has no word for.
        plain = _Plain()
        body = body | {"result": plain(body["result"])}
        return _compact(body | {"non_finite": True} if plain.met_non_finite else body)


def _compact(body: dict[str, Any]) -> str:
    return json.dumps(body, allow_nan=False, separators=(",", ":"))


class _Plain:
    """Turns values of kombu's JSON into those of JSON, and remembers whether a float had to become null."""

    def __init__(self) -> None:
        self.met_non_finite = False

    def __call__(self, value: Any) -> Any:
        match value:
            case dict():
                return {key: self(child) for key, child in value.items()}
            case list():
                return [self(child) for child in value]
            case float() if not math.isfinite(value):
                self.met_non_finite = True
                return None
            case date() | time():
                return value.isoformat()
            case UUID() | Decimal():
                return str(value)
            case bytes():
                return base64.b64encode(value).decode()
            case _:
                return value
