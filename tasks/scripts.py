"""Lua scripts that run on the server, by their digest where it knows them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import redis


class Script:
    """One script. Its keys carry the application's prefix already: clients that add one of their own miss some.

    Every script here may write while the server is out of memory, for it makes room: what is held is given back or
    settled. That flag needs Redis 7 or Valkey.
    """

    def __init__(self, body: str) -> None:
        self._text = f"#!lua flags=allow-oom\n{body}"
        self._digest = hashlib.sha1(self._text.encode(), usedforsecurity=False).hexdigest()

    def __call__(self, client: redis.Redis, keys: Sequence[str], arguments: Sequence[Any] = ()) -> Any:
        """Run it and return its reply. Redis errors propagate."""
        try:
            return client.execute_command(*self.by_digest(keys, arguments))  # type: ignore[no-untyped-call]
        except redis.exceptions.NoScriptError:  # the first time, and after a restart or failover of the server
            return client.execute_command(*self.by_text(keys, arguments))  # type: ignore[no-untyped-call]

    def by_digest(self, keys: Sequence[str], arguments: Sequence[Any] = ()) -> tuple[Any, ...]:
        """Return the command for a server that knows the script."""
        return ("EVALSHA", self._digest, len(keys), *keys, *arguments)

    def by_text(self, keys: Sequence[str], arguments: Sequence[Any] = ()) -> tuple[Any, ...]:
        """Return the command for a server that does not."""
        return ("EVAL", self._text, len(keys), *keys, *arguments)
