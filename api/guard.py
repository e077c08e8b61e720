"""Keeps a Redis that is away, frozen or full from holding up requests."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

import redis
from kombu.exceptions import LimitExceeded, OperationalError

from .errors import StorageFull, Unavailable

logger = logging.getLogger(__name__)

FAILURES = (redis.RedisError, OperationalError, LimitExceeded, OSError)

# Replies by which a Redis that is up says that it cannot serve now.
_REFUSING = (redis.exceptions.ReadOnlyError, redis.exceptions.MasterDownError, redis.exceptions.TryAgainError)
_REFUSING_PREFIXES = ("MISCONF", "NOREPLICAS")


class Guard:
    """Stands before all calls of one service and turns its failures into answers.

    A service that refuses does so at once, so each call finds out for itself. One that is silent costs each
    call its timeout; in a process of few threads these would add up. So after a timeout calls are refused
    unseen, until a ping in the background has got through, or is refused too.

    Args:
        name: of the service, for the log.
        unavailable: what to answer while the service is away.
        ping: one round trip to the service, on the timeout of calls.
    """

    def __init__(self, name: str, unavailable: type[Unavailable], ping: Callable[[], object]) -> None:
        self._name = name
        self._message = f"The {name} is away; try again."
        self._unavailable = unavailable
        self._ping = ping
        self._away = False
        self._silent = False
        self._lock = threading.Lock()

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Run calls of the service.

        Raises:
            Unavailable: it is away. A call that was under way may still have been carried out.
            StorageFull: it has no memory left.
        """
        if self._silent:
            raise self._unavailable(self._message)
        try:
            yield
        except FAILURES as error:
            self._refuse(error)
        if self._away:
            self._away = False
            logger.warning("%s answers again", self._name)

    def _refuse(self, error: Exception) -> NoReturn:
        cause = _cause(error)
        if isinstance(cause, redis.OutOfMemoryError):
            raise StorageFull(f"The {self._name} has no memory left.") from error
        if isinstance(cause, redis.ResponseError) and not _refuses(cause):
            raise error
        if not self._away:
            self._away = True
            # Messages of redis-py name host and port, never credentials.
            logger.warning("%s unavailable: %s: %s", self._name, type(cause).__name__, cause)
        if isinstance(cause, redis.TimeoutError | TimeoutError):
            self._await_reply()
        raise self._unavailable(self._message) from error

    def _await_reply(self) -> None:
        with self._lock:
            if self._silent:
                return
            self._silent = True
        threading.Thread(target=self._ping_until_reply, name=f"ping-{self._name}", daemon=True).start()

    def _ping_until_reply(self) -> None:
        try:
            while self._times_out():
                pass
        finally:
            self._silent = False

    def _times_out(self) -> bool:
        try:
            self._ping()
        except FAILURES as error:
            return isinstance(_cause(error), redis.TimeoutError | TimeoutError)
        return False


def _cause(error: BaseException) -> BaseException:
    """Unwrap kombu, which raises its OperationalError from the driver's error."""
    while isinstance(error, OperationalError) and error.__cause__ is not None:
        error = error.__cause__
    return error


def _refuses(error: redis.ResponseError) -> bool:
    return isinstance(error, _REFUSING) or str(error).startswith(_REFUSING_PREFIXES)
