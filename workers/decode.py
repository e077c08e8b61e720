"""Reading stock Celery messages: protocol 2, JSON, by schema. What does not fit is left to Celery's own code."""

from __future__ import annotations

from typing import Any

import msgspec
from kombu.exceptions import DecodeError
from kombu.utils.json import loads

_JSON = "application/json"
# kombu's JSON writes values of other types as objects with this member.
_TYPED = b'"__type__"'


class Headers(msgspec.Struct, frozen=True):
    """What this worker reads of a message's headers; absent ones have Celery's meaning of absence."""

    task: str
    id: str
    eta: Any = None
    expires: Any = None
    shadow: str | None = None
    compression: Any = None
    stamped_headers: Any = None
    group: str | None = None
    root_id: str | None = None
    parent_id: str | None = None
    retries: int | None = None
    ignore_result: bool | None = None
    redelivered: bool = False
    argsrepr: str = ""
    kwargsrepr: str = ""


class _Properties(msgspec.Struct, frozen=True):
    body_encoding: str


class _Envelope(msgspec.Struct, frozen=True, rename="kebab"):
    headers: Headers
    properties: _Properties
    body: bytes  # base64, which msgspec decodes
    content_type: str
    content_encoding: str


_envelopes = msgspec.json.Decoder(_Envelope)
_bodies = msgspec.json.Decoder(tuple[list[Any], dict[str, Any], dict[str, Any] | None])

Arguments = tuple[list[Any], dict[str, Any], dict[str, Any]]


def decode(text: bytes) -> tuple[Headers, Arguments] | None:
    """Return headers and arguments, keyword arguments and embedded callbacks of a message; None where it is unusual."""
    try:
        envelope = _envelopes.decode(text)
        headers = envelope.headers
        if (
            envelope.content_type != _JSON
            or envelope.content_encoding != "utf-8"
            or envelope.properties.body_encoding != "base64"
            or headers.eta is not None
            or headers.shadow is not None
            or headers.compression is not None
        ):
            return None
        args, kwargs, embedded = _typed(envelope.body) if _TYPED in envelope.body else _bodies.decode(envelope.body)
    except (msgspec.MsgspecError, DecodeError, UnicodeError, ValueError, TypeError, RecursionError):
        return None
    return headers, (args, kwargs, embedded or {})


def _typed(body: bytes) -> Arguments:
    args, kwargs, embedded = loads(body)
    if not (isinstance(args, list) and isinstance(kwargs, dict)):
        raise TypeError("not the body of a task")
    return args, kwargs, embedded or {}
