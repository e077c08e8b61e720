"""What workers tell the API about their tasks, through Redis: names, queues and schemas.

The API validates requests from this alone, so it needs neither torch nor the module that declares the task,
and it works while no worker is up.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from typing import Any

import msgspec
from celery.backends.redis import RedisBackend
from kombu.utils.encoding import bytes_to_str

FORMAT_VERSION = 1


class TaskSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One task as callers see it."""

    name: str
    queue: str
    item_schema: dict[str, Any]
    """JSON Schema of one item."""
    options_schema: dict[str, Any]
    """JSON Schema of the object of options; no other options are allowed."""
    max_batch_size: int
    max_wait_ms: float
    result_ttl_s: int


class Registry:
    """The task specs in the Redis of a result backend. Redis errors propagate."""

    def __init__(self, backend: RedisBackend) -> None:
        self._backend = backend

    def publish(self, specs: Iterable[TaskSpec]) -> None:
        """Make these specs known; a spec of the same name is replaced, others stay."""
        fields = {spec.name: msgspec.json.encode(spec) for spec in specs}
        if fields:
            self._backend.client.hset(self._key("tasks"), mapping=fields)

    def get(self, name: str) -> TaskSpec | None:
        """Return the spec that was published last under ``name``."""
        stored = self._backend.client.hget(self._key("tasks"), name)
        return None if stored is None else msgspec.json.decode(stored, type=TaskSpec)

    def all(self) -> dict[str, TaskSpec]:
        """Return every published spec by name."""
        stored = self._backend.client.hgetall(self._key("tasks"))
        return {name.decode(): msgspec.json.decode(spec, type=TaskSpec) for name, spec in stored.items()}

    def id_key(self) -> bytes:
        """Return the 32 secret bytes that all API processes of this Redis sign their ids with."""
        key = self._key("id-key")
        # Read first: a full Redis still answers reads, and the key is there after the first time.
        stored = self._backend.client.get(key)
        if stored is None:
            self._backend.client.set(key, secrets.token_bytes(32), nx=True)
            stored = self._backend.client.get(key)
        return bytes(stored)

    def _key(self, name: str) -> str:
        return backend_key(self._backend, name)


def backend_key(backend: RedisBackend, name: str) -> str:
    """Return the key of something of ours in the Redis of a result backend."""
    # The backend has put the application's global_keyprefix before its own prefix.
    prefix = bytes_to_str(backend.task_keyprefix).removesuffix("celery-task-meta-")
    return f"{prefix}busload:{FORMAT_VERSION}:{name}"
