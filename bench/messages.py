"""Messages as ``send_task`` makes them, for the price of a few replacements, and the answers to them."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from uuid import uuid4

import redis
from celery import Celery

from ..embedded import EmbeddedServer

_ID = "00000000-0000-4000-8000-000000000000"
_ITEM = "<item>"
_BODY = "<body>"
_CHUNK = 1000
_RESULT_KEY = "celery-task-meta-"


@dataclass(frozen=True)
class Template:
    """The message of a real call, where id and item stand for those of another."""

    message: str
    body: str

    @classmethod
    def of(cls, server: EmbeddedServer, task: str, queue: str) -> Template:
        """Send one task and take its message back. The queue must be empty and without a consumer."""
        # Without a backend, or the client would subscribe to a channel for the result.
        with Celery(broker=server.url, set_as_current=False) as app, server.client() as client:
            app.send_task(task, (_ITEM,), task_id=_ID, queue=queue)
            message = json.loads(client.rpop(queue))
        body = base64.b64decode(message["body"]).decode()
        message["body"] = _BODY
        message["properties"]["delivery_tag"] = _ID
        return cls(json.dumps(message), body)

    def fill(self, task_id: str, item: str) -> bytes:
        body = base64.b64encode(self.body.replace(_ITEM, item).encode()).decode()
        return self.message.replace(_ID, task_id).replace(_ITEM, item).replace(_BODY, body).encode()


@dataclass(frozen=True)
class Messages:
    """The calls of one run, by number: each has an id and an item of its own."""

    template: Template
    run: str
    """The first 23 characters of every id."""

    @classmethod
    def new(cls, template: Template) -> Messages:
        return cls(template, str(uuid4())[:23])

    def task_id(self, number: int) -> str:
        return f"{self.run}-{number:012x}"

    def item(self, number: int) -> str:
        return f"item {number}"

    def message(self, number: int) -> bytes:
        return self.template.fill(self.task_id(number), self.item(number))

    def push(self, client: redis.Redis, queue: str, count: int) -> None:
        """Put the messages 0 to ``count - 1`` on the queue."""
        for numbers in _chunks(count):
            client.lpush(queue, *map(self.message, numbers))


@dataclass(frozen=True)
class Answers:
    """The stored results of the first ``count`` messages of a run, of an echo task."""

    client: redis.Redis
    messages: Messages
    count: int

    def has_last(self) -> bool:
        """Whether the last message is answered: one cheap command, to be asked often."""
        return bool(self.client.exists(self._key(self.count - 1)))

    def wrong(self, patience_s: float = 5.0) -> int:
        """Return how many have no right answer, once that is none or ``patience_s`` have passed."""
        deadline = time.monotonic() + patience_s
        while (wrong := sum(self._are_wrong())) and time.monotonic() < deadline:
            time.sleep(0.1)
        return wrong

    def stored_at(self, lifetime_s: float) -> Iterator[tuple[int, float]]:
        """Yield the number of each answer that is there, and when it was stored, in seconds since the epoch.

        The server itself knows that to the millisecond: it is when the result expires, less its lifetime.
        """
        for numbers in _chunks(self.count):
            with self.client.pipeline(transaction=False) as pipe:
                for number in numbers:
                    pipe.pexpiretime(self._key(number))
                expiries_ms = pipe.execute()
            for number, expires_ms in zip(numbers, expiries_ms, strict=True):
                if expires_ms > 0:
                    yield number, expires_ms / 1000 - lifetime_s

    def _are_wrong(self) -> Iterator[bool]:
        for numbers in _chunks(self.count):
            stored = self.client.mget([self._key(number) for number in numbers])
            for number, meta in zip(numbers, stored, strict=True):
                yield meta is None or not self._is_right(number, json.loads(meta))

    def _is_right(self, number: int, meta: dict[str, object]) -> bool:
        return meta["status"] == "SUCCESS" and meta["result"] == self.messages.item(number)

    def _key(self, number: int) -> str:
        return _RESULT_KEY + self.messages.task_id(number)


def _chunks(count: int) -> Iterable[range]:
    return (range(start, min(start + _CHUNK, count)) for start in range(0, count, _CHUNK))
