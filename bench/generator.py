"""Sends messages at a steady rate, whatever becomes of them: a process of its own in ``busload bench rate``.

It waits for no answer, not even the server's to LPUSH, so that a delay anywhere holds no later message back.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any

import redis

from .messages import Messages, Template

# What is due is sent this often at most; a message waits for its turn no longer than that.
_TICK_S = 0.001
_START_IN_S = 0.2


@dataclass(frozen=True)
class Schedule:
    """When message ``n`` is due: ``n / rate`` seconds after the first."""

    socket_path: str
    queue: str
    messages: Messages
    count: int
    rate: float

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Schedule:
        fields: dict[str, Any] = json.loads(text)
        messages = fields.pop("messages")
        return cls(messages=Messages(Template(**messages["template"]), messages["run"]), **fields)


@dataclass(frozen=True)
class Sent:
    """When the first message was due, in seconds since the epoch and on the monotonic clock."""

    began_at: float
    began_at_monotonic: float
    latest_ms: float
    """How much later than due a message was handed to the server, at worst."""


def send(schedule: Schedule) -> Sent:
    """Send the messages of ``schedule``, each when it is due, and return when all of them are on the server."""
    client = redis.Redis(unix_socket_path=schedule.socket_path)
    connection: Any = client.connection_pool.get_connection()
    began_at = time.monotonic() + _START_IN_S
    began_at_epoch = time.time() + began_at - time.monotonic()
    sent, unread, latest_s = 0, 0, 0.0
    while sent < schedule.count:
        time.sleep(max(_TICK_S, began_at + sent / schedule.rate - time.monotonic()))
        due = min(schedule.count, int((time.monotonic() - began_at) * schedule.rate) + 1)
        if due <= sent:
            continue
        messages = [schedule.messages.message(number) for number in range(sent, due)]
        connection.send_command("LPUSH", schedule.queue, *messages)
        latest_s = max(latest_s, time.monotonic() - began_at - sent / schedule.rate)
        sent, unread = due, unread + 1
        while unread and connection.can_read(timeout=0):
            connection.read_response()
            unread -= 1
    for _ in range(unread):
        connection.read_response()
    client.close()
    return Sent(began_at_epoch, began_at, latest_s * 1000)


if __name__ == "__main__":
    json.dump(asdict(send(Schedule.from_json(sys.stdin.read()))), sys.stdout)
