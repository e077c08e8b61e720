"""The Celery application through which the API submits tasks and reads results.

It is built to fail fast: each connect and each reply has a deadline, and nothing is retried behind a
request's back.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from celery import Celery
from celery.backends.redis import RedisBackend
from redis import BlockingConnectionPool
from redis.backoff import NoBackoff
from redis.retry import Retry

from .settings import Settings

MAX_CONNECTIONS = 16
"""Most connections of one process to broker and to backend each; further callers wait for a free one."""


class ApiBackend(RedisBackend):
    """Celery's Redis backend for a process that reads records and never waits on an ``AsyncResult``."""

    app: Celery

    def on_task_call(self, producer: Any, task_id: str) -> None:
        """Do nothing, where Celery subscribes to the result of each task: nothing here would unsubscribe."""

    @property
    def ConnectionPool(self) -> Any:
        return partial(BlockingConnectionPool, timeout=self.app.conf.redis_socket_timeout, retry=Retry(NoBackoff(), 0))


def make_celery(settings: Settings) -> Celery:
    """Return a Celery application that knows no tasks. Connects to nothing yet."""
    app = Celery(
        "busload.api",
        broker=settings.broker_url.get_secret_value(),
        backend=settings.result_backend_url.get_secret_value(),
        set_as_current=False,
    )
    app.loader.override_backends = dict.fromkeys(("redis", "rediss"), f"{__name__}:ApiBackend")
    timeout_s = settings.redis_timeout_s
    app.conf.update(
        accept_content=["json"],
        result_accept_content=["json"],
        task_publish_retry=False,
        broker_connection_timeout=timeout_s,
        broker_pool_limit=MAX_CONNECTIONS,
        broker_transport_options={
            "socket_connect_timeout": timeout_s,
            "socket_timeout": timeout_s,
            "retry_on_timeout": False,
            # Of opening a connection, which kombu would else repeat, with pauses of seconds.
            "max_retries": 0,
        },
        redis_max_connections=MAX_CONNECTIONS,
        redis_socket_connect_timeout=timeout_s,
        redis_socket_timeout=timeout_s,
        redis_retry_on_timeout=False,
    )
    return app
