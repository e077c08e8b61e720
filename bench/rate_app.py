"""The worker of ``busload bench rate``: a model that takes 5 ms for a batch of any size, and notes when it ran."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from celery import Celery, signals

from ..tasks import BatchTask, configure

BATCH_S = 0.005
RESULT_TTL_S = 3600

_url = os.environ.get("BUSLOAD_BROKER_URL", "memory://")

app = configure(Celery("bench", broker=_url, backend=os.environ.get("BUSLOAD_RESULT_BACKEND")))
app.conf.busload_receive = os.environ.get("BENCH_RECEIVE", "drain")
app.conf.result_expires = RESULT_TTL_S
app.conf.worker_send_task_events = os.environ.get("BENCH_EVENTS") == "on"
app.conf.task_routes = {"bench.model": {"queue": "model"}}

_runs: list[tuple[float, float, int]] = []


@app.task(base=BatchTask, name="bench.model")
def model(items: list[Any], /) -> list[Any]:
    began_at = time.monotonic()
    time.sleep(BATCH_S)
    _runs.append((began_at, time.monotonic(), len(items)))
    return items


@signals.worker_shutdown.connect
def write_runs(**kwargs: Any) -> None:
    Path(os.environ["BENCH_RUNS"]).write_text(json.dumps(_runs))
