"""Which effective settings of a worker would lose work or break batches, one line each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import redis
from celery.concurrency.thread import TaskPool as ThreadPool
from celery.worker import WorkController

from ..tasks.task import BatchTask

# What Celery has when nobody chose: too small for batches, and no one's wish.
_CELERY_DEFAULT_PREFETCH = 4
# The first whose scripts may make room while the server is out of memory.
_LEAST_REDIS = 7
_PICKLE = {"pickle", "application/x-python-serialize"}


def prefetch_count(worker: WorkController, tasks: Sequence[BatchTask[Any, ..., Any]]) -> int:
    """Return how many messages the worker may hold: its setting, or four of the largest batches.

    One batch runs while the one before is settled, the next one is ready and the one after that is fetched.
    """
    if worker.prefetch_multiplier != _CELERY_DEFAULT_PREFETCH:
        return int(worker.prefetch_multiplier)
    return 4 * max(task.max_batch_size for task in tasks)


def refusals(worker: WorkController, tasks: Sequence[BatchTask[Any, ..., Any]]) -> Iterator[str]:
    """Yield why ``worker`` must not run ``tasks``; nothing when it may."""
    conf = worker.app.conf
    pool = worker.pool_cls
    if not runs_on_threads(worker):
        name = pool if isinstance(pool, str) else pool.__module__.rsplit(".", 1)[-1]
        yield f"the {name} pool cannot share one model; start the worker with -P threads -c 1"
    elif worker.concurrency != 1:
        yield f"concurrency {worker.concurrency} would let other tasks crowd the model; start it with -c 1"
    if worker.autoscale:
        yield "autoscale has nothing to scale: one process runs one batch at a time; start more workers instead"
    prefetch = prefetch_count(worker, tasks)
    largest = max(task.max_batch_size for task in tasks)
    if prefetch == 0:
        yield (
            "worker_prefetch_multiplier=0 would let this worker hoard every message; "
            f"leave it unset, or set at least {largest}"
        )
    elif prefetch < largest:
        yield (
            f"worker_prefetch_multiplier={prefetch} caps batches at {prefetch} of {largest} items; "
            f"leave it unset, or set at least {largest}"
        )
    if conf.worker_disable_prefetch:
        yield "worker_disable_prefetch=True caps batches at one item; leave it unset"
    if _PICKLE & {*conf.accept_content, *(conf.result_accept_content or ())}:
        yield "accept_content allows pickle, which runs code from data; allow json or msgpack alone"


def server_refusal(client: redis.Redis) -> str | None:
    """Return why messages cannot be drained from a Redis server; None when they can, or it may not be asked."""
    try:
        server: dict[str, Any] = client.info()
    except redis.exceptions.NoPermissionError:
        return None
    if server.get("cluster_enabled"):
        return "Redis Cluster is not supported: it spreads over its nodes what one call must see; use a single server"
    version = str(server.get("redis_version", "7"))
    if "valkey_version" not in server and int(version.partition(".")[0]) < _LEAST_REDIS:
        return f"Redis {version} is too old to drain from; use Redis {_LEAST_REDIS} or Valkey"
    return None


def runs_on_threads(worker: WorkController) -> bool:
    """Whether the worker's pool is ``threads``, in whose process a model can live."""
    return isinstance(worker.pool_cls, type) and issubclass(worker.pool_cls, ThreadPool)


def warnings(tasks: Sequence[BatchTask[Any, ..., Any]]) -> Iterator[str]:
    """Yield which settings have no effect on batched tasks."""
    for task in tasks:
        if task.time_limit or task.soft_time_limit:
            yield f"task {task.name}: time limits are not enforced on batches"
