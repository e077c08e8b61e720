"""Settling calls: their outcomes are stored in the shape that Celery stores, then their messages are let go."""

from __future__ import annotations

import os
from functools import cached_property
from itertools import groupby
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

from ..batching import Failed, Outcome
from ..tasks import direct
from ..tasks.task import BatchTask
from .acks import Acks
from .drain import Drain
from .request import Call
from .results import ResultEncoder, Write
from .store import OneCallStore, Refused, Store, TwoStepStore, Verdict, is_one_server

logger = get_logger(__name__)

Settled = list[tuple[Call, Outcome]]

_HANDLERS = ("before_start", "on_success", "on_failure", "after_return")
_SIGNALS = (signals.task_prerun, signals.task_postrun, signals.task_success, signals.task_failure)


class Settle(Protocol):
    """Stores the outcomes of a batch. Errors of a server that is away propagate; then it may be called again."""

    def settle(self, settled: Settled) -> Settled:
        """Store every outcome that is ours to tell, and let go of the calls.

        Returns outcomes as stored, for a result may turn out not to fit, and none of calls that others have by now.
        """
        ...

    def final(self, calls: list[Call]) -> set[str]:
        """Return the ids of those calls whose outcome is stored already, as far as the backend can tell."""
        ...

    def mark_started(self, calls: list[Call]) -> None:
        """Store the state STARTED for calls of a task that tracks it."""
        ...


class TracedSettle:
    """Settles each call through Celery's own tracer, which is told the outcome instead of running the task.

    Everything that Celery does after a task happens here in Celery's order: callbacks, the next step of a
    chain, the chord's counter, signals and handlers, then the result.
    """

    def __init__(self, app: Celery, hostname: str, acks: Acks) -> None:
        self._app = app
        self.hostname = hostname
        self._acks = acks
        self._away = away_errors(app)

    def settle(self, settled: Settled) -> Settled:
        if not settled:
            return []
        ours = set(self._acks.still_ours([call for call, _ in settled]))
        stored = [(call, self._settle_one(call, outcome)) for call, outcome in settled if call in ours]
        self._acks.release([call for call, _ in stored])
        return stored

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
                    hostname=self.hostname,
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
            if not call.ignore_result:
                call.task.backend.mark_as_started(call.id)


class RedisSettle:
    """Settles plain calls in one or two round trips a batch, the others through Celery's tracer.

    A call is plain when nothing but its result is left to do, in the application's backend: no callback, chain
    or chord, no listener on Celery's signals, no handler in the task's class.
    """

    def __init__(self, backend: RedisBackend, traced: TracedSettle, acks: Acks, drain: Drain) -> None:
        self._backend = backend
        self._traced = traced
        self._drain = drain
        self._encoder = ResultEncoder(backend)
        self._two_step = TwoStepStore(backend, self._encoder, acks)
        self._hostname = traced.hostname
        self._handlers: dict[BatchTask[Any, ..., Any], bool] = {}

    def settle(self, settled: Settled) -> Settled:
        plain: Settled = []
        others: Settled = []
        somebody_listens = any(map(_listens, _SIGNALS))
        for call, outcome in settled:
            is_plain = not (somebody_listens or call.embedded or self._has_handlers(call.task))
            (plain if is_plain and _uses_the_applications_backend(call) else others).append((call, outcome))
        stored = self._store_plain(plain)
        stored += self._traced.settle(others)
        self._set_lifetimes([call for call, _ in others])
        return stored

    def final(self, calls: list[Call]) -> set[str]:
        if self._one_call is not None:
            # An outcome that is stored in one call with the end of its lease has no message that could come again.
            calls = [
                call for call in calls if call.redelivered or call.embedded or not isinstance(call.deliveries[0], int)
            ]
        ours = [call for call in calls if _uses_the_applications_backend(call)]
        others = [call for call in calls if not _uses_the_applications_backend(call)]
        return self._two_step.final(ours) | self._traced.final(others)

    def mark_started(self, calls: list[Call]) -> None:
        tracked = [call for call in calls if not call.ignore_result]
        self._store([self._encoder.started(call, os.getpid(), self._hostname) for call in tracked], release=False)

    def _store_plain(self, settled: Settled) -> Settled:
        writes = self._encoder.encode(settled)
        stored: Settled = []
        instead = []
        for write, verdict in zip(writes, self._store(writes), strict=True):
            if isinstance(verdict, Refused):
                instead.append(self._encoder.instead(write.call, str(verdict)))
            elif verdict:
                stored.append((write.call, write.outcome))
        if instead:
            stored += [
                (write.call, write.outcome)
                for write, verdict in zip(instead, self._store(instead), strict=True)
                if verdict is True
            ]
        return stored

    def _store(self, writes: list[Write], *, release: bool = True) -> list[Verdict]:
        verdicts: list[Verdict] = []
        for store, group in groupby(writes, self._store_for):
            verdicts += store.store(list(group), release=release)
        return verdicts

    def _store_for(self, write: Write) -> Store:
        """Return the shortest way that there is for a write."""
        is_leased = any(isinstance(delivery, int) for delivery in write.call.deliveries)
        return self._one_call if is_leased and self._one_call is not None else self._two_step

    @cached_property
    def _one_call(self) -> OneCallStore | None:
        leases = self._drain.leases
        if leases is None or self._backend.serializer != "json" or self._backend.compression:
            return None
        if not is_one_server(self._backend, leases.client):
            return None
        return OneCallStore(self._backend, self._encoder, leases)

    def _has_handlers(self, task: BatchTask[Any, ..., Any]) -> bool:
        if task not in self._handlers:
            self._handlers[task] = any(task_has_custom(task, name) for name in _HANDLERS)
        return self._handlers[task]

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


def make_settle(app: Celery, hostname: str, acks: Acks, drain: Drain) -> Settle:
    """Choose how outcomes are stored with the application's result backend."""
    traced = TracedSettle(app, hostname, acks)
    backend = app.backend
    if isinstance(backend, RedisBackend) and _stores_as_celery(type(backend)):
        return RedisSettle(backend, traced, acks, drain)
    return traced


def away_errors(app: Celery) -> tuple[type[BaseException], ...]:
    """Return what a broker or result backend raises while it is away or full, after which it is tried again."""
    own = getattr(app.backend, "connection_errors", ())
    # Celery counts KeyError and OSError among those of Redis; they are users' errors as well.
    return (OperationalError, redis.RedisError, *(error for error in own if error.__module__ != "builtins"))


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
