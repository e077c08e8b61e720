"""Storing outcomes: one pipeline of results per batch, in the shape that Celery's Redis backend stores."""

from __future__ import annotations

from typing import Any, Protocol
from weakref import ReferenceType

from celery import Celery, signals, states
from celery.app.trace import task_has_custom, trace_task
from celery.backends.redis import RedisBackend
from celery.exceptions import Reject
from celery.utils.log import get_logger
from kombu.exceptions import OperationalError

from ..batching import Failed, Outcome, ResultEncodeError
from ..tasks import direct
from .request import Call

logger = get_logger(__name__)

Settled = list[tuple[Call, Outcome]]

_HANDLERS = ("before_start", "on_success", "on_failure", "after_return")
_SIGNALS = (signals.task_prerun, signals.task_postrun, signals.task_success, signals.task_failure)
_EMBEDDED = ("callbacks", "errbacks", "chain", "chord")


class Settle(Protocol):
    """Stores the outcomes of a batch. Connection errors propagate, and then it may be called again."""

    def settle(self, settled: Settled) -> Settled:
        """Store every outcome; return them as stored, for a result may turn out not to fit."""
        ...

    def final(self, calls: list[Call]) -> set[str]:
        """Return the ids of those calls whose outcome is stored already."""
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
        self._connection_errors = connection_errors(app)

    def settle(self, settled: Settled) -> Settled:
        return [(call, self._settle_one(call, outcome)) for call, outcome in settled]

    def _settle_one(self, call: Call, outcome: Outcome) -> Outcome:
        if call.traced is not None:  # before a connection error interrupted the batch
            return call.traced
        request = {**call.request.request_dict, **(call.request._payload[2] or {}), "is_eager": False}
        try:
            with direct.known_outcome(outcome):
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
        if isinstance(error, self._connection_errors):
            # The tracer reports it like any error; but nothing is stored yet, so the call is still ours.
            raise error
        if error is not None and not (isinstance(outcome, Failed) and outcome.error is error):
            outcome = Failed.from_error(error)
        call.traced = outcome
        return outcome

    def final(self, calls: list[Call]) -> set[str]:
        return {call.id for call in calls if call.task.backend.get_state(call.id) in states.READY_STATES}

    def mark_started(self, calls: list[Call]) -> None:
        for call in calls:
            if call.task.track_started and not call.request.ignore_result:
                call.task.backend.mark_as_started(call.id)


class RedisSettle:
    """Settles plain calls in two round trips a batch, the others through Celery's tracer.

    A call is plain when nothing but its result is left to do: no callback, chain or chord, no listener on
    Celery's signals, no handler in the task's class.
    """

    def __init__(self, backend: RedisBackend, traced: TracedSettle) -> None:
        self._backend = backend
        self._traced = traced

    def settle(self, settled: Settled) -> Settled:
        plain = [(call, outcome) for call, outcome in settled if is_plain(call)]
        others = [(call, outcome) for call, outcome in settled if not is_plain(call)]
        stored = self._store(plain)
        stored += self._traced.settle(others)
        self._set_lifetimes(others)
        return stored

    def final(self, calls: list[Call]) -> set[str]:
        keys = [self._backend.get_key_for_task(call.id) for call in calls]
        metas = self._backend.client.mget(keys) if keys else []
        return {
            call.id
            for call, meta in zip(calls, metas, strict=True)
            if meta is not None and self._backend.decode_result(meta)["status"] in states.READY_STATES
        }

    def mark_started(self, calls: list[Call]) -> None:
        tracked = [call for call in calls if call.task.track_started and not call.request.ignore_result]
        if not tracked:
            return
        with self._backend.client.pipeline(transaction=False) as pipe:
            for call in tracked:
                meta = {"pid": call.request.worker_pid, "hostname": call.request.hostname}
                self._write(pipe, call, self._encode(call, meta, states.STARTED, None))
            pipe.execute()

    def _store(self, settled: Settled) -> Settled:
        stored: Settled = []
        writes: list[tuple[Call, bytes | str, int]] = []
        final = self.final([call for call, _ in settled])
        for call, outcome in settled:
            if call.id not in final and _stores(call, outcome):
                try:
                    meta = self._encode_outcome(call, outcome)
                except Exception as error:  # noqa: BLE001  serializers raise what they like; this call alone fails
                    outcome = Failed.from_error(ResultEncodeError(f"the result cannot be stored: {error}"))
                    meta = self._encode_outcome(call, outcome)
                failed = isinstance(outcome, Failed)
                writes.append((call, meta, self._backend.failure_expires if failed else self._backend.expires))
            stored.append((call, outcome))
        if writes:
            with self._backend.client.pipeline(transaction=False) as pipe:
                for call, meta, lifetime_s in writes:
                    self._write(pipe, call, meta, lifetime_s)
                pipe.execute()
        return stored

    def _encode_outcome(self, call: Call, outcome: Outcome) -> bytes | str:
        if isinstance(outcome, Failed):
            return self._encode(call, outcome.error, states.FAILURE, outcome.traceback)
        return self._encode(call, plain_value(outcome.value), states.SUCCESS, None)

    def _encode(self, call: Call, result: Any, state: str, traceback: str | None) -> bytes | str:
        meta = self._backend._get_result_meta(
            result=self._backend.encode_result(result, state),
            state=state,
            traceback=traceback,
            request=call.request._context,
        )
        meta["task_id"] = call.id
        encoded: bytes | str = self._backend.encode(meta)
        return encoded

    def _write(self, pipe: Any, call: Call, meta: bytes | str, lifetime_s: int | None = None) -> None:
        key = self._backend.get_key_for_task(call.id)
        lifetime_s = call.task.result_ttl_s or lifetime_s or self._backend.expires
        pipe.set(key, meta, ex=lifetime_s or None)
        pipe.publish(key, meta)

    def _set_lifetimes(self, settled: Settled) -> None:
        """Give results that Celery stored the lifetime of their own task."""
        own = [call for call, _ in settled if call.task.result_ttl_s]
        if not own:
            return
        with self._backend.client.pipeline(transaction=False) as pipe:
            for call in own:
                pipe.expire(self._backend.get_key_for_task(call.id), call.task.result_ttl_s)
            pipe.execute()


def make_settle(app: Celery, hostname: str) -> Settle:
    """Choose how outcomes are stored with the application's result backend."""
    traced = TracedSettle(app, hostname)
    if isinstance(app.backend, RedisBackend):
        return RedisSettle(app.backend, traced)
    return traced


def connection_errors(app: Celery) -> tuple[type[BaseException], ...]:
    """Return what a lost broker or result backend raises, after which storing is tried again."""
    return (OperationalError, *getattr(app.backend, "connection_errors", ()))


def is_plain(call: Call) -> bool:
    """Whether storing the result is all that is left to do for ``call``."""
    embed = call.request._payload[2] or {}
    return not (
        any(embed.get(name) for name in _EMBEDDED)
        or any(_listens(signal) for signal in _SIGNALS)
        or any(task_has_custom(call.task, name) for name in _HANDLERS)
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


def plain_value(value: Any) -> Any:
    """Turn an array, tensor or array scalar into plain numbers."""
    return value.tolist() if hasattr(value, "tolist") else value
