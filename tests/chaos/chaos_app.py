"""The application of workers that are killed: each run of a batch is counted, by item, on the server."""

from __future__ import annotations

import json
import os
import time
from typing import Any

import redis
from celery import Celery

from busload import BatchTask, configure

URL = os.environ.get("BUSLOAD_BROKER_URL", "memory://")

app = configure(Celery("chaos", broker=URL, backend=URL if URL != "memory://" else "cache+memory://"))
app.conf.worker_send_task_events = False
app.conf.update(json.loads(os.environ.get("CHAOS_SETTINGS", "{}")))

_clients: dict[int, redis.Redis] = {}


def server() -> redis.Redis:
    """Return a client of this process's own."""
    if os.getpid() not in _clients:
        path = app.conf.broker_url.removeprefix("redis+socket://").partition("?")[0]
        _clients[os.getpid()] = redis.Redis(unix_socket_path=path)
    return _clients[os.getpid()]


@app.task(base=BatchTask, name="chaos.double")
def double(numbers: list[int], /, *, nap_s: float = 0.005) -> list[int]:
    with server().pipeline(transaction=False) as pipe:
        for number in numbers:
            pipe.hincrby("runs", str(number), 1)
        pipe.execute()
    time.sleep(nap_s)
    return [2 * number for number in numbers]


@app.task(base=BatchTask, name="chaos.linked")
def linked(numbers: list[int], /, *, nap_s: float = 0.0) -> list[int]:
    time.sleep(nap_s)
    return [2 * number for number in numbers]


@app.task(name="chaos.note")
def note(number: Any) -> None:
    server().hincrby("notes", str(number), 1)
