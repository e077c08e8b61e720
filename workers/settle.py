"""Storing outcomes: one Redis pipeline of results per batch, in the shape that Celery's Redis backend stores."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol
from weakref import ReferenceType

import redis
from celery import Celery, signals, states
from celery.app.trace import task_has_custom, trace_task
from celery.backends.base import BaseKeyValueStoreBackend
from celery.backends.redis import RedisBackend
from celery.exceptions import Reject
from celery.utils.log import get_logger
from kombu.exceptions import OperationalError
from kombu.utils.encoding import safe_repr

from ..batching import Failed, Outcome, ResultEncodeError, Succeeded
from ..tasks import direct
from .request import Call

logger = get_logger(__name__)

Settled = list[tuple[Call, Outcome]]

_HANDLERS = ("before_start", "on_success", "on_failure", "after_return")
_SIGNALS = (signals.task_prerun, signals.task_postrun, signals.task_success, signals.task_failure)
_EMBEDDED = ("callbacks", "errbacks", "chain", "chord")

# From the server, these will pass; its other errors are about what it was sent.
_PASSING = (redis.ConnectionError, redis.TimeoutError, redis.OutOfMemoryError, redis.ReadOnlyError)
# A server closes the connection on a value beyond its limit, proto-max-bulk-len, which is no less than this.
_MAY_BE_TOO_LARGE_BYTES = 1024 * 1024


class Settle(Protocol):
    """Stores the outcomes of a batch. Errors of a server that is away propagate; then it may be called again."""

    def settle(self, settled: Settled) -> Settled:
        """Store every outcome; return them as stored, for a result may turn out not to fit."""
        ...

    def final(self, calls: list[Call]) -> set[str]:
        """Return the ids of those calls whose outcome is stored already, as far as the backend can tell."""
        ...

    def mark_started(self, calls: list[Call]) -> None:
        """Store the state STARTED for calls whose task tracks it."""
        ...


class TracedSettle:
    """Settles each call through Celery's own tracer, which is told the outcome instead of running the task.

    Everything that Celery does after a task happens here in Celery's order: callbacks, the next step of a
    chain, the chord's counter, signals and handlers, then the result.
    """

    def __init__(self, app: Celery, hostname: str) -> None:
        self._app = app
        self._hostname = hostname
        self._away = away_errors(app)

    def settle(self, settled: Settled) -> Settled:
        return [(call, self._settle_one(call, outcome)) for call, outcome in settled]

    def _settle_one(self, call: Call, outcome: Outcome) -> Outcome:
        if call.traced is not None:  # before the backend went away in the middle of the batch
            return call.traced
        request = {**call.request.request_dict, **call.embedded, "is_eager": False}
        try:
            with direct.known_outcome(call.id, outcome):
                trace = trace_task(
                    call.task,
                    call.id,
                    call.request.args,
                    call.request.kwargs,
                    request,
                    hostname=self._hostname,
                    loader=self._app.loader,
                    app=self._app,
                )
            error = None if trace.info is None else trace.info.retval
        except Reject as rejection:
            logger.exception("Task %s[%s]: a handler or callback rejected the outcome", call.task.name, call.id)
            error = rejection
        is_own = isinstance(outcome, Failed) and outcome.error is error
        if error is not None and not is_own:
            if isinstance(error, self._away):
                # The tracer reports it like any error; but nothing is stored yet, so the call is still ours.
                raise error
            outcome = Failed.from_error(error)
        call.traced = outcome
        return outcome

    def final(self, calls: list[Call]) -> set[str]:
        # Other backends cannot be asked, or not without side effects.
        known = [call for call in calls if isinstance(call.task.backend, BaseKeyValueStoreBackend)]
        return {call.id for call in known if call.task.backend.get_state(call.id) in states.READY_STATES}

    def mark_started(self, calls: list[Call]) -> None:
        for call in calls:
            if call.task.track_started and not call.request.ignore_result:
                call.task.backend.mark_as_started(call.id)


@dataclass(frozen=True, slots=True)
class _Write:
    """What is to be stored for one call."""

    call: Call
    outcome: Outcome
    meta: bytes | str
    lifetime_s: int


class RedisSettle:
    """Settles plain calls in two round trips a batch, the others through Celery's tracer.

    A call is plain when nothing but its result is left to do, in the application's backend: no callback, chain
    or chord, no listener on Celery's signals, no handler in the task's class.
    """

    def __init__(self, backend: RedisBackend, traced: TracedSettle) -> None:
        self._backend = backend
        self._traced = traced

    def settle(self, settled: Settled) -> Settled:
        plain: Settled = []
        others: Settled = []
        for call, outcome in settled:
            (plain if is_plain(call) else others).append((call, outcome))
        stored = self._store(plain)
        stored += self._traced.settle(others)
        self._set_lifetimes([call for call, _ in others])
        return stored

    def final(self, calls: list[Call]) -> set[str]:
        ours = [call for call in calls if _uses_the_applications_backend(call)]
        metas = self._backend.client.mget([self._backend.get_key_for_task(call.id) for call in ours]) if ours else []
        final = {call.id for call, meta in zip(ours, metas, strict=True) if self._is_final(meta)}
        return final | self._traced.final([call for call in calls if not _uses_the_applications_backend(call)])

    def mark_started(self, calls: list[Call]) -> None:
        tracked = [call for call in calls if call.task.track_started and not call.request.ignore_result]
        writes = []
        for call in tracked:
            result = {"pid": call.request.worker_pid, "hostname": call.request.hostname}
            meta = self._encode(call, result, states.STARTED, None, call.request._context)
            writes.append(_Write(call, Succeeded(result), meta, self._backend.expires))
        self._send(writes)

    def _is_final(self, meta: bytes | None) -> bool:
        if meta is None:
            return False
        try:
            return self._backend.decode_result(meta).get("status") in states.READY_STATES
        except Exception:  # noqa: BLE001  whatever a serializer raises
            logger.warning("busload: overwriting a stored result that cannot be read")
            return False

    def _store(self, settled: Settled) -> Settled:
        # A final state stays final, whoever stored it.
        final = self.final([call for call, _ in settled])
        writes = [
            self._write_of(call, outcome)
            for call, outcome in settled
            if call.id not in final and _stores(call, outcome)
        ]
        written = {write.call.id: write.outcome for write in self._send_all(writes)}
        return [(call, written.get(call.id, outcome)) for call, outcome in settled]

    def _write_of(self, call: Call, outcome: Outcome) -> _Write:
        request = call.request._context
        try:
            if isinstance(outcome, Failed):
                meta = self._encode(call, outcome.error, states.FAILURE, outcome.traceback, request)
            else:
                meta = self._encode(call, outcome.value, states.SUCCESS, None, request)
        except Exception as error:  # noqa: BLE001  whatever a serializer raises: only this call fails
            outcome = Failed.from_error(ResultEncodeError(f"the result cannot be stored: {safe_repr(error)}"))
            # Without the request, whose arguments may be what does not fit.
            meta = self._encode(call, outcome.error, states.FAILURE, outcome.traceback, None)
        is_failure = isinstance(outcome, Failed)
        return _Write(call, outcome, meta, self._backend.failure_expires if is_failure else self._backend.expires)

    def _encode(self, call: Call, result: Any, state: str, traceback: str | None, request: Any) -> bytes | str:
        meta = self._backend._get_result_meta(
            result=self._backend.encode_result(result, state),
            state=state,
            traceback=traceback,
            request=request,
        )
        meta["task_id"] = call.id
        encoded: bytes | str = self._backend.encode(meta)
        return encoded

    def _send_all(self, writes: list[_Write]) -> list[_Write]:
        """Store all of them, or one by one what can be: a result that the server refuses fails its own call."""
        try:
            self._send(writes)
            return writes
        except _PASSING:
            if not any(len(write.meta) >= _MAY_BE_TOO_LARGE_BYTES for write in writes):
                raise
        except redis.RedisError:
            logger.warning("busload: a batch of results was refused; storing them one by one", exc_info=True)
        return [self._send_alone(write) for write in writes]

    def _send_alone(self, write: _Write) -> _Write:
        try:
            self._send([write])
            return write
        except _PASSING as error:
            if len(write.meta) < _MAY_BE_TOO_LARGE_BYTES:
                raise
            refusal: redis.RedisError = error
        except redis.RedisError as error:
            refusal = error
        size = f"{len(write.meta)} bytes"
        failed = Failed.from_error(ResultEncodeError(f"Redis refuses the result of {size}: {refusal}"))
        instead = self._write_of(write.call, failed)
        self._send([instead])
        return instead

    def _send(self, writes: list[_Write]) -> None:
        if not writes:
            return
        with self._backend.client.pipeline(transaction=False) as pipe:
            for write in writes:
                key = self._backend.get_key_for_task(write.call.id)
                own_s = write.call.task.result_ttl_s
                pipe.set(key, write.meta, ex=(write.lifetime_s if own_s is None else own_s) or None)
                pipe.publish(key, write.meta)
            pipe.execute()

    def _set_lifetimes(self, calls: list[Call]) -> None:
        """Give results that Celery stored the lifetime of their own task."""
        own = [call for call in calls if call.task.result_ttl_s is not None and _uses_the_applications_backend(call)]
        if not own:
            return
        with self._backend.client.pipeline(transaction=False) as pipe:
            for call in own:
                key = self._backend.get_key_for_task(call.id)
                if call.task.result_ttl_s:
                    pipe.expire(key, call.task.result_ttl_s)
                else:
                    pipe.persist(key)
            pipe.execute()


def make_settle(app: Celery, hostname: str) -> Settle:
    """Choose how outcomes are stored with the application's result backend."""
    traced = TracedSettle(app, hostname)
    backend = app.backend
    if isinstance(backend, RedisBackend) and _stores_as_celery(type(backend)):
        return RedisSettle(backend, traced)
    return traced


def away_errors(app: Celery) -> tuple[type[BaseException], ...]:
    """Return what a broker or result backend raises while it is away or full, after which it is tried again."""
    own = getattr(app.backend, "connection_errors", ())
    # Celery counts KeyError and OSError among those of Redis; they are users' errors as well.
    return (OperationalError, redis.RedisError, *(error for error in own if error.__module__ != "builtins"))


def is_plain(call: Call) -> bool:
    """Whether storing the result in the application's backend is all that is left to do for ``call``."""
    embed = call.embedded
    return _uses_the_applications_backend(call) and not (
        any(embed.get(name) for name in _EMBEDDED)
        or any(_listens(signal) for signal in _SIGNALS)
        or any(task_has_custom(call.task, name) for name in _HANDLERS)
    )


def _uses_the_applications_backend(call: Call) -> bool:
    return call.task._backend is None


def _stores_as_celery(backend_class: type[RedisBackend]) -> bool:
    """Whether a backend, which may be a subclass, stores results with Celery's own code."""
    return all(
        getattr(backend_class, name) is getattr(RedisBackend, name)
        for name in ("store_result", "_store_result", "_set_with_state", "set", "_set")
    )


def _listens(signal: Any) -> bool:
    """Whether anybody but Celery's Django fixup receives ``signal``: it closes connections, as the runner does."""
    receivers = (receiver() if isinstance(receiver, ReferenceType) else receiver for _, receiver in signal.receivers)
    return any(
        receiver is not None and type(getattr(receiver, "__self__", None)).__name__ != "DjangoWorkerFixup"
        for receiver in receivers
    )


def _stores(call: Call, outcome: Outcome) -> bool:
    return bool(call.request.store_errors if isinstance(outcome, Failed) else not call.request.ignore_result)
