"""The application that the workers of these tests run."""

from __future__ import annotations

import json
import os
import time
from typing import Any

import redis
from celery import Celery
from celery.exceptions import Ignore
from kombu import Exchange, Queue

from busload import BatchTask, configure

URL = os.environ.get("BUSLOAD_BROKER_URL", "memory://")

app = configure(Celery("worker_app", broker=URL, backend=URL if URL != "memory://" else "cache+memory://"))
app.conf.update(json.loads(os.environ.get("WORKER_APP_SETTINGS", "{}")))

if "WORKER_APP_QUEUE" in os.environ:
    name, exchange, key = os.environ["WORKER_APP_QUEUE"].split()
    app.conf.task_queues = [Queue(name, Exchange(exchange), routing_key=key)]


def note(items: list[Any]) -> None:
    """Write a batch down in the ledger."""
    # On the broker's server, for some of these workers have no result backend.
    path = app.conf.broker_url.removeprefix("redis+socket://").partition("?")[0]
    with redis.Redis(unix_socket_path=path) as client:
        client.rpush("ledger", json.dumps(items))


@app.task(base=BatchTask, name="echo")
def echo(items: list[Any], /, *, tag: str = "", nap_s: float = 0.0) -> list[Any]:
    note(items)
    time.sleep(nap_s)
    return [f"{tag}{item}" if isinstance(item, str) else item for item in items]


@app.task(base=BatchTask, name="double")
def double(numbers: list[int], /) -> list[Any]:
    note(numbers)
    return [number * 2 if number >= 0 else ValueError(f"{number} is negative") for number in numbers]


@app.task(base=BatchTask, name="boom")
def boom(items: list[str], /) -> list[str]:
    note(items)
    raise RuntimeError("the model broke")


@app.task(base=BatchTask, name="short")
def short(items: list[str], /) -> list[str]:
    return items[:-1]


@app.task(base=BatchTask, name="quits")
def quits(items: list[str], /) -> list[str]:
    raise SystemExit(3)


@app.task(base=BatchTask, name="repeat", per_item=("times",))
def repeat(words: list[str], /, *, times: list[int] = 1, end: str = ".") -> list[str]:  # type: ignore[assignment]
    note(words)
    return [word * count + end for word, count in zip(words, times, strict=True)]


@app.task(base=BatchTask, name="odd_results")
def odd_results(kinds: list[str], /) -> list[Any]:
    made = {"set": {1, 2}, "object": object(), "number": 1.5}
    return [made[kind] for kind in kinds]


@app.task(base=BatchTask, name="missing_key")
def missing_key(items: list[str], /) -> list[str]:
    note(items)
    raise KeyError("no such row")


@app.task(base=BatchTask, name="timeouts")
def timeouts(items: list[str], /) -> list[Any]:
    return [TimeoutError(f"{item} took too long") for item in items]


@app.task(base=BatchTask, name="ignores")
def ignores(items: list[str], /) -> list[Any]:
    return [Ignore() for _ in items]


@app.task(base=BatchTask, name="large")
def large(sizes: list[int], /) -> list[str]:
    return ["x" * size for size in sizes]


@app.task(base=BatchTask, name="small_batches", max_batch_size=8)
def small_batches(items: list[Any], /, *, nap_s: float = 0.05) -> list[Any]:
    note(items)
    time.sleep(nap_s)
    return items


@app.task(base=BatchTask, name="options_seen")
def options_seen(items: list[Any], /, *, option: Any = None) -> list[str]:
    note(items)
    return [repr(option) for _ in items]


@app.task(base=BatchTask, name="brief", result_ttl_s=77)
def brief(items: list[str], /) -> list[str]:
    return items


@app.task(base=BatchTask, name="tracked", track_started=True)
def tracked(items: list[str], /, *, nap_s: float = 0.0) -> list[str]:
    time.sleep(nap_s)
    return items


@app.task(name="plain_echo")
def plain_echo(item: Any) -> Any:
    return item


@app.task(name="plain_boom")
def plain_boom(item: Any) -> Any:
    raise RuntimeError("the model broke")


@app.task(name="plain_join")
def plain_join(items: list[Any]) -> str:
    return "+".join(map(str, items))


@app.task(name="plain_calls_batched")
def plain_calls_batched(item: str) -> list[str]:
    return [echo(item, tag="direct "), echo(item)]


@app.task(name="note_error")
def note_error(failed_id: str) -> None:
    note([f"error of {failed_id}"])
