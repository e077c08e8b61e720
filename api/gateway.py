"""What the routes ask of Redis: submit a call, read what has become of one."""

from __future__ import annotations

import time
from typing import Any, cast

from celery import Celery
from celery.backends.redis import RedisBackend
from flask import current_app

from ..tasks.registry import Registry
from . import ids, records, validation
from .broker import make_celery
from .errors import BackendUnavailable, BrokerUnavailable, Expired, UnknownId, UnknownTask
from .guard import Guard
from .settings import Settings

LONGEST_WAIT_S = 3600
"""How long a call may be pending before its result's lifetime begins, as far as the answer 410 goes.

It is Celery's visibility timeout, after which the calls of a killed worker are delivered again.
"""


class Gateway:
    """The API's side of the queues and the result store. Thread safe."""

    def __init__(self, celery: Celery, *, timeout_s: float) -> None:
        self._celery = celery
        self._timeout_s = timeout_s
        self._backend = cast("RedisBackend", celery.backend)
        self._registry = Registry(self._backend)
        self._on_broker = Guard("broker", BrokerUnavailable, self._ping_broker)
        self._on_backend = Guard("result backend", BackendUnavailable, self._backend.client.ping)

    @classmethod
    def from_settings(cls, settings: Settings) -> Gateway:
        return cls(make_celery(settings), timeout_s=settings.redis_timeout_s)

    def submit(self, name: str, item: Any, options: dict[str, Any]) -> str:
        """Queue one call, with the message that stock Celery sends, and return its id.

        Raises:
            UnknownTask: no worker has published such a task.
            InvalidInput, InvalidOptions: the task does not take this.
            Unavailable: Redis is away; the call may have been queued all the same.
            StorageFull: Redis has no memory left.
        """
        with self._on_backend():
            spec = self._registry.get(name)
            if spec is None:
                raise UnknownTask("No worker has published this task yet. Is one running, and has its model loaded?")
            key = self._registry.id_key()
        validation.check(spec, item, options)
        task_id = ids.mint(key, _now_ms())
        with (
            self._on_broker(),
            self._celery.producer_pool.acquire(block=True, timeout=self._timeout_s) as producer,
        ):
            self._celery.send_task(
                name,
                args=[item],
                kwargs=options,
                task_id=task_id,
                queue=spec.queue,
                retry=False,
                producer=producer,
            )
        return task_id

    def status_json(self, task_id: str) -> str:
        """Return what is known of a call, as the JSON of a ``CallStatus``.

        Raises:
            UnknownId: the API did not mint this id, and Redis has no record of it.
            Expired: its record, if there ever was one, is gone.
            Unavailable: Redis cannot.
        """
        with self._on_backend():
            stored = self._backend.client.get(self._backend.get_key_for_task(task_id))
            if stored is None:
                self._check_pending(task_id)
                return records.pending_json(task_id)
        return records.record_json(task_id, stored, self._backend)

    def _check_pending(self, task_id: str) -> None:
        minted_ms = ids.minted_at_ms(self._registry.id_key(), task_id)
        if minted_ms is None:
            raise UnknownId("There is no task of this id.")
        lifetimes_s = [spec.result_ttl_s for spec in self._registry.all().values()]
        if 0 in lifetimes_s:  # results of that task never expire, and the id does not say whose it is
            return
        if _now_ms() - minted_ms > 1000 * (max(lifetimes_s, default=0) + LONGEST_WAIT_S):
            raise Expired("The result of this task has expired.")

    def _ping_broker(self) -> None:
        with self._celery.connection_for_write() as connection:
            connection.ensure_connection(max_retries=0)


def gateway() -> Gateway:
    """Return the gateway of the application that handles this request."""
    return cast("Gateway", current_app.extensions["busload"])


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
