"""The worker of celery-batches in ``busload bench overhead``. It runs in an environment of its own, without busload.

Of the pools, prefork does the most tasks a second with celery-batches, for about the CPU time that solo needs, the
least: its child stores results while its parent receives. Threads need a fifth more.
"""

from __future__ import annotations

import os
from typing import Any

from celery import Celery
from celery_batches import Batches

BATCH = 64

_url = os.environ.get("BUSLOAD_BROKER_URL", "memory://")

app = Celery("batches", broker=_url, backend=os.environ.get("BUSLOAD_RESULT_BACKEND"))
app.conf.worker_send_task_events = os.environ.get("BENCH_EVENTS") == "on"
app.conf.result_expires = 3600
app.conf.task_routes = {"bench.batches": {"queue": "batches"}}
# One batch runs while the next one gathers. With Celery's own 4 there would never be a full batch.
app.conf.worker_prefetch_multiplier = 2 * BATCH


# A backlog fills every batch but the last, so the interval, in seconds, cuts none short.
@app.task(base=Batches, flush_every=BATCH, flush_interval=1, name="bench.batches")
def batches(requests: list[Any]) -> None:
    for request in requests:
        app.backend.mark_as_done(request.id, request.args[0], request=request)
