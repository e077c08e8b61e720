"""Waiting for messages without taking any: the server says when a list changes that we have looked at."""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Sequence
from typing import Any

import redis
from celery.utils.log import get_logger

from ..tasks.scripts import Script

logger = get_logger(__name__)

# KEYS: lists, then the hash of drained counts. Returns depth and drained count of each list. One reply to all of them:
# between several, what is told of the first lists would be taken for seen.
_LOOK = Script("""
local numbers = {}
for list = 1, #KEYS - 1 do
    numbers[2 * list - 1] = redis.call('LLEN', KEYS[list])
    numbers[2 * list] = tonumber(redis.call('HGET', KEYS[#KEYS], KEYS[list]) or 0)
end
return numbers
""")

POLL_S = 0.02
"""How often a server is asked that does not tell by itself."""


class Doorbell:
    """One connection that looks at lists and is told when one of them changes (``CLIENT TRACKING``).

    Each look arms the bell for what it looked at, so that while nobody waits for it nothing is told. A server, proxy
    or user that may not track is asked again and again instead. For one thread, but for ``wake``. Redis errors
    propagate; the next look connects anew.
    """

    def __init__(self, client: redis.Redis) -> None:
        self._pool: Any = client.connection_pool
        self._connection: Any = None
        self._tells = True
        self._woken = threading.Event()
        self._is_polling = False
        self._wake_reader, self._wake_writer = os.pipe()
        os.set_blocking(self._wake_reader, False)
        os.set_blocking(self._wake_writer, False)

    def look(self, drained_key: str, queues: Sequence[Sequence[str]]) -> list[tuple[int, int]]:
        """Return depth and drained count of each queue, which is given by the keys of its lists."""
        lists = [key for queue in queues for key in queue]
        try:
            connection = self._connected()
            connection.send_command(*_LOOK.by_digest([*lists, drained_key]))
            try:
                numbers = connection.read_response()
            except redis.exceptions.NoScriptError:
                connection.send_command(*_LOOK.by_text([*lists, drained_key]))
                numbers = connection.read_response()
        except BaseException:
            self.disconnect()
            raise
        found, first = [], 0
        for queue in queues:
            last = first + 2 * len(queue)
            found.append((sum(numbers[first:last:2]), sum(numbers[first + 1 : last : 2])))
            first = last
        return found

    def wait(self, timeout_s: float | None, *, for_messages: bool) -> None:
        """Return after ``timeout_s`` seconds, when woken or, if asked for, when a list changes."""
        if for_messages and self._connection is not None and self._tells:
            self._wait_for_messages(timeout_s)
        else:
            if for_messages:
                timeout_s = POLL_S if timeout_s is None else min(timeout_s, POLL_S)
            self._woken.wait(None if timeout_s is None else max(0.0, timeout_s))
        self._woken.clear()

    def wake(self) -> None:
        """End a wait, or the next one. For any thread."""
        self._woken.set()
        # Writing would let other threads go first: the runner, which wakes us between two batches, has no time for it.
        if self._is_polling:
            try:
                os.write(self._wake_writer, b".")
            except BlockingIOError:  # a full pipe wakes as well
                return

    def _wait_for_messages(self, timeout_s: float | None) -> None:
        if self._connection.can_read(timeout=0):  # what is in the buffer no longer makes the socket readable
            return
        poll = select.poll()
        poll.register(self._wake_reader, select.POLLIN)
        poll.register(self._connection._sock, select.POLLIN)
        self._is_polling = True
        if not self._woken.is_set():
            poll.poll(None if timeout_s is None else max(0.0, timeout_s) * 1000)
        self._is_polling = False
        try:
            os.read(self._wake_reader, 4096)
        except BlockingIOError:
            return

    def disconnect(self) -> None:
        if self._connection is not None:
            self._connection.disconnect()
            self._pool.release(self._connection)
            self._connection = None

    def close(self) -> None:
        self.disconnect()
        os.close(self._wake_reader)
        os.close(self._wake_writer)

    def _connected(self) -> Any:
        if self._connection is None:
            connection = self._connection = self._pool.get_connection()
            try:
                connection.send_command("CLIENT", "TRACKING", "ON")
                connection.read_response()
                # In RESP2 the server agrees, but tells nothing on this connection.
                self._tells = str(connection.get_protocol()) == "3"
            except redis.ResponseError as error:
                if self._tells:
                    logger.warning("busload: the server does not tell of new messages, asking it instead: %s", error)
                self._tells = False
        return self._connection
