"""The workers of ``busload bench overhead``: one echo task, plain and batched, each on its own queue."""

from __future__ import annotations

import os
from typing import Any

from celery import Celery

from ..tasks import BatchTask, configure

_url = os.environ.get("BUSLOAD_BROKER_URL", "memory://")

app = configure(Celery("bench", broker=_url, backend=os.environ.get("BUSLOAD_RESULT_BACKEND")))
app.conf.worker_send_task_events = os.environ.get("BENCH_EVENTS") == "on"
app.conf.busload_receive = os.environ.get("BENCH_RECEIVE", "drain")
app.conf.task_routes = {"bench.plain": {"queue": "plain"}, "bench.batched": {"queue": "batched"}}


@app.task(name="bench.plain")
def plain(item: Any) -> Any:
    return item


@app.task(base=BatchTask, name="bench.batched")
def batched(items: list[Any], /) -> list[Any]:
    return items
