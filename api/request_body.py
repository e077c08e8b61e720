"""Strict reading of request bodies: one JSON object in UTF-8, of bounded size and depth."""

from __future__ import annotations

from typing import Any

import msgspec
from flask import Request
from werkzeug.exceptions import RequestEntityTooLarge

from .errors import InvalidJson, UnsupportedMediaType

MAX_DEPTH = 100
"""Deepest nesting of a body: all that handle it later recurse, so the bound lies far below Python's own."""
MAX_DISCARDED_BYTES = 16 << 20
"""How much of a body that is too large is read all the same, for the client to get its answer."""


class StrictJsonRequest(Request):
    """A Flask request whose ``get_json`` refuses what Python's ``json`` would let pass.

    That is other encodings, NaN and infinities (also ``1e999``), lone surrogates, and anything but an object.
    """

    def get_json(self, force: bool = False, silent: bool = False, cache: bool = True) -> dict[str, Any]:
        """Return the body.

        Raises:
            UnsupportedMediaType: the content type is not ``application/json`` in UTF-8.
            InvalidJson: the body is no JSON object.
            RequestEntityTooLarge: the body is longer than the application allows, declared or not.
        """
        # Before all else: a client that is still sending when the connection closes may never see the answer.
        encoded = self._read()
        if self.mimetype != "application/json":
            raise UnsupportedMediaType("The content type must be application/json.")
        if self.mimetype_params.get("charset", "utf-8").lower() not in ("utf-8", "utf8"):
            raise UnsupportedMediaType("The charset must be UTF-8.")
        try:
            body = msgspec.json.decode(encoded)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise InvalidJson(f"The body is not JSON in UTF-8: {error}") from error
        except RecursionError as error:
            raise _too_deep() from error
        if not isinstance(body, dict):
            raise InvalidJson("The body must be a JSON object.")
        if _deeper_than(body, MAX_DEPTH):
            raise _too_deep()
        return body

    def _read(self) -> bytes:
        try:
            encoded = self.get_data()
            if self.max_content_length is not None and len(encoded) >= self.max_content_length:
                raise RequestEntityTooLarge
        except RequestEntityTooLarge:
            self._discard_rest()
            raise
        return encoded

    def _discard_rest(self) -> None:
        left = min(self.content_length or MAX_DISCARDED_BYTES, MAX_DISCARDED_BYTES)
        while left > 0 and (chunk := self.environ["wsgi.input"].read(min(left, 1 << 16))):
            left -= len(chunk)


def _too_deep() -> InvalidJson:
    return InvalidJson(f"The body is nested deeper than {MAX_DEPTH} levels.")


def _deeper_than(value: Any, depth: int) -> bool:
    level = [value]
    for _ in range(depth):
        level = [
            child
            for parent in level
            for child in (parent.values() if isinstance(parent, dict) else parent)
            if isinstance(child, dict | list)
        ]
        if not level:
            return False
    return True
