"""``busload demo``: real sentences through REST and ``delay()``, embedded in batches, checked one by one."""

from __future__ import annotations

import http.client
import json
import math
import os
import pydoc_data.topics
import re
import signal
import statistics
import time
import urllib.parse
import urllib.request
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

from celery.result import AsyncResult

from .app import QUEUE
from .batching import BusloadError
from .stack import Progress, Stack, running_stack
from .tasks.leases import Holder, LeaseBook
from .tasks.ready import embed

QUERY = "Which names are looked up in the enclosing scope?"
SENTENCES = 200
HTTP_CLIENTS = 4
WORKERS = 2
SENT_AGAIN = 64
"""Texts of which a worker is killed while it holds some: the largest batch."""
TIMEOUT_S = 60.0
# Padding changes the last bits of a float32 sum.
MIN_COSINE = 0.9999

Vector = list[float]


class DemoFailed(BusloadError):
    """A result is missing or wrong."""


@dataclass(frozen=True)
class Report:
    """What the demo measured. Times are in milliseconds, rates in texts per second."""

    texts: int
    by_rest: int
    by_delay: int
    batches: int
    mean_fill: float
    p50_ms: float
    p99_ms: float
    batched_per_s: float
    alone_per_s: float
    least_cosine: float
    seen_in_flower: int
    held_by_killed: int
    """Texts that a worker held when it was killed. All of them have their results."""
    query: str
    nearest: list[tuple[float, str]]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class _Call:
    """One call that was sent: its id, and when, in seconds since the epoch."""

    id: str
    sent_at: float


def run_demo(progress: Progress, sentences: int = SENTENCES) -> Report:
    """Run the main job once on an embedded server.

    Raises DemoFailed when a result is missing, is not the vector of its own text, or is not shown in Flower.
    """
    with running_stack("busload.demo_app", progress, workers=WORKERS) as stack:
        stack.app.set_current()
        stack.app.conf.task_default_queue = QUEUE
        texts = sentences_of_python_docs(sentences)
        half = len(texts) // 2
        progress(f"sending  {half} texts by REST and {len(texts) - half} by embed.delay()")
        began_at = time.time()
        with ThreadPoolExecutor(HTTP_CLIENTS) as clients:
            by_rest = clients.map(lambda share: _submit_by_rest(stack.api_url, share), _shares(texts[:half]))
            by_delay = [_Call(embed.delay(text).id, time.time()) for text in texts[half:]]
            calls = _in_order(list(by_rest), half) + by_delay
        vectors, finished_at = _collect(stack, calls)
        totals = _batch_totals(stack, "busload.embed")
        progress("sending  the same texts to the same model one at a time")
        alone_at = time.time()
        alone = [stack.app.send_task("demo.embed_alone", (text,)) for text in texts]
        alone_vectors, alone_finished_at = _collect(stack, [_Call(result.id, alone_at) for result in alone])
        least_cosine = _compare(texts, vectors, alone_vectors)
        seen_in_flower = _count_in_flower(stack, "busload.embed", len(texts))
        held_by_killed = _kill_a_worker(stack, texts[:SENT_AGAIN], alone_vectors[:SENT_AGAIN], progress)
        waits_ms = [(done - call.sent_at) * 1000 for call, done in zip(calls, finished_at, strict=True)]
        percentiles = statistics.quantiles(waits_ms, n=100)
        return Report(
            texts=len(texts),
            by_rest=half,
            by_delay=len(texts) - half,
            batches=totals["batches"],
            mean_fill=totals["items"] / totals["batches"],
            p50_ms=percentiles[49],
            p99_ms=percentiles[98],
            batched_per_s=len(texts) / (max(finished_at) - began_at),
            alone_per_s=len(texts) / (max(alone_finished_at) - alone_at),
            least_cosine=least_cosine,
            seen_in_flower=seen_in_flower,
            held_by_killed=held_by_killed,
            query=QUERY,
            nearest=_nearest(embed.delay(QUERY).get(timeout=TIMEOUT_S), texts, vectors),
        )


def sentences_of_python_docs(count: int) -> list[str]:
    """Return ``count`` different sentences from the documentation that Python carries."""
    text = " ".join(topic for _, topic in sorted(pydoc_data.topics.topics.items()))
    flat = re.sub(r"\s+", " ", text)
    found = re.findall(r"(?<=[.!?] )[A-Z][a-zA-Z ,'\-]{40,120}\.(?= [A-Z])", flat)
    return list(dict.fromkeys(found))[:count]


def _shares(texts: Sequence[str]) -> list[Sequence[str]]:
    return [texts[start::HTTP_CLIENTS] for start in range(HTTP_CLIENTS)]


def _in_order(shares: Sequence[Sequence[_Call]], count: int) -> list[_Call]:
    return [shares[index % HTTP_CLIENTS][index // HTTP_CLIENTS] for index in range(count)]


def _submit_by_rest(api_url: str, texts: Sequence[str]) -> list[_Call]:
    connection = http.client.HTTPConnection(urllib.parse.urlsplit(api_url).netloc, timeout=TIMEOUT_S)
    calls = []
    for text in texts:
        sent_at = time.time()
        connection.request(
            "POST",
            "/v1/tasks/busload.embed",
            json.dumps({"input": text}),
            {"Content-Type": "application/json"},
        )
        response = connection.getresponse()
        body = response.read()
        if response.status != 202:
            raise DemoFailed(f"the API answered {response.status}: {body.decode()}")
        calls.append(_Call(json.loads(body)["id"], sent_at))
    connection.close()
    return calls


def _collect(stack: Stack, calls: Sequence[_Call]) -> tuple[list[Vector], list[float]]:
    """Return the vector of every call, and when it was stored, in seconds since the epoch."""
    results = [AsyncResult(call.id, app=stack.app) for call in calls]
    deadline = time.monotonic() + TIMEOUT_S
    for result in results:
        while not result.ready():
            if time.monotonic() > deadline:
                raise DemoFailed(f"no result for {result.id} after {TIMEOUT_S:.0f} s")
            if death := stack.wait(timeout_s=0.005):
                raise DemoFailed(str(death))
        if result.state != "SUCCESS":
            raise DemoFailed(f"{result.id} ended {result.state}: {result.result!r}")
    return [result.result for result in results], [_timestamp(result) for result in results]


def _timestamp(result: AsyncResult[Any]) -> float:
    done: datetime = result.date_done
    return done.timestamp()


def _batch_totals(stack: Stack, task: str) -> Counter[str]:
    """Return what the workers that answer have done of ``task``, added up."""
    totals: Counter[str] = Counter()
    for reply in stack.app.control.broadcast("batches", reply=True, timeout=5.0, limit=WORKERS):
        for by_task in reply.values():
            totals.update(by_task.get(task, {}))
    if not totals["batches"]:
        raise DemoFailed("no worker knows of a batch")
    return totals


def _kill_a_worker(stack: Stack, texts: Sequence[str], expected: Sequence[Vector], progress: Progress) -> int:
    """Send texts again until a worker is killed while it holds some of them, and return how many it held.

    Raises DemoFailed when one of the results is missing or wrong.
    """
    workers = stack.app.control.inspect(timeout=5.0, limit=WORKERS).stats() or {}
    pids = {name: int(stats["pid"]) for name, stats in workers.items()}
    book = LeaseBook.of(stack.app)
    calls: list[_Call] = []
    deadline, many_until = time.monotonic() + TIMEOUT_S, 0.0
    while not (held := _kill_holder(book, pids, len(texts) // 2 if time.monotonic() < many_until else 1)):
        if time.monotonic() > deadline:
            raise DemoFailed(f"none of the workers {', '.join(pids)} held a text")
        if not calls or AsyncResult(calls[-1].id, app=stack.app).ready():
            calls += [_Call(embed.delay(text).id, time.time()) for text in texts]
            many_until = time.monotonic() + 0.5
        time.sleep(0.001)
    progress(f"killed   a worker, which held {held} of {len(calls)} texts that were sent again")
    vectors, _ = _collect(stack, calls)
    rounds = len(calls) // len(texts)
    _compare([*texts] * rounds, vectors, [*expected] * rounds)
    return held


def _kill_holder(book: LeaseBook, pids: Mapping[str, int], at_least: int) -> int:
    """Kill the worker that holds most, if it is enough, and return how many messages; else 0."""

    def held() -> dict[str, Holder]:
        return {holder.incarnation: holder for holder in book.holders() if _node(holder) in pids}

    holder = max(held().values(), key=lambda holder: holder.messages, default=None)
    if holder is None or holder.messages < at_least:
        return 0
    pid = pids[_node(holder)]
    os.kill(pid, signal.SIGSTOP)  # so that it holds what we count when it dies
    messages = held()[holder.incarnation].messages
    os.kill(pid, signal.SIGKILL if messages else signal.SIGCONT)
    return messages


def _node(holder: Holder) -> str:
    return holder.incarnation.rpartition("/")[0]


def _compare(texts: Sequence[str], vectors: Sequence[Vector], alone: Sequence[Vector]) -> float:
    """Return the least cosine between a text's batched vector and the one that it gets alone."""
    least = 1.0
    for text, vector, expected in zip(texts, vectors, alone, strict=True):
        cosine = _dot(vector, expected)
        if not cosine >= MIN_COSINE:
            raise DemoFailed(f"wrong vector (cosine {cosine:.4f}) for: {text}")
        least = min(least, cosine)
    return least


def _nearest(query: Vector, texts: Sequence[str], vectors: Sequence[Vector]) -> list[tuple[float, str]]:
    return sorted(zip((_dot(query, vector) for vector in vectors), texts, strict=True), reverse=True)[:3]


def _dot(left: Vector, right: Vector) -> float:
    return math.fsum(a * b for a, b in zip(left, right, strict=True))


def _count_in_flower(stack: Stack, task: str, expected: int) -> int:
    """Return how many calls of ``task`` Flower lists as done, waiting for its events to arrive."""

    def count() -> int:
        query = urllib.parse.urlencode({"taskname": task, "state": "SUCCESS", "limit": expected + 1})
        with urllib.request.urlopen(f"{stack.flower_url}/api/tasks?{query}", timeout=10.0) as response:
            return len(json.load(response))

    seen = _until(count, lambda seen: seen >= expected)
    if seen != expected:
        raise DemoFailed(f"Flower shows {seen} of {expected} calls as done")
    return seen


def _until(read: Callable[[], int], is_enough: Callable[[int], bool]) -> int:
    deadline = time.monotonic() + TIMEOUT_S / 6
    while not is_enough(value := read()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return value
