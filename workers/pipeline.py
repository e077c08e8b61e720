"""A worker's way from message to outcome: intake, runner, settling and acknowledging.

The consumer's thread takes messages and acknowledges them; one thread prepares, one runs, one settles.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar

from celery import Celery
from celery.utils.log import get_logger
from celery.worker import state

from ..batching import Failed, Outcome, Policy, fail_all
from ..tasks.task import BatchTask
from . import crashes
from .acks import Acks, keep_at_close
from .drain import Drain
from .events import Events
from .intake import Intake
from .request import Call, Partition, differing_options
from .runner import BatchRun, Runner
from .settle import Settle, Settled, away_errors, is_plain
from .stats import BatchStats

logger = get_logger(__name__)

T = TypeVar("T")

_FIRST_RETRY_S = 0.05
_LAST_RETRY_S = 1.0
_MAX_OPTION_SETS = 32


class Pipeline:
    """Holds every call from its message to its acknowledgement.

    ``call_soon(function)`` runs a function on the consumer's thread, soon. Results are stored before messages
    are acknowledged, so a crash at any point leaves a message that will be delivered again.
    """

    def __init__(
        self,
        app: Celery,
        settle: Settle,
        acks: Acks,
        events: Events,
        call_soon: Callable[[Callable[[], None]], Any],
    ) -> None:
        self.stats = BatchStats()
        self._tasks = app.tasks
        self._settle = settle
        self._acks = acks
        self._events = events
        self._call_soon = call_soon
        self._away = away_errors(app)
        self._intake = Intake(self._policy_of)
        self.runner = Runner(self._intake, self)
        self._held: dict[str, Call] = {}
        self._unstarted: deque[Call] = deque()
        self._mailbox: deque[Callable[[], None]] = deque()
        self._store_work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._settler = threading.Thread(target=crashes.guard(self._store), name="busload-settle", daemon=True)
        self._stopping = threading.Event()
        self._abandoned = threading.Event()
        self._warned: set[str] = set()
        self._drain: Drain | None = None

    # -- on the consumer's thread ----------------------------------------------------------------------

    def start(self) -> None:
        self.runner.start()
        self._settler.start()

    def accept(self, call: Call, partition: Partition) -> None:
        """Let a call wait for its batch."""
        if not self._hold(call):
            return
        option_sets = self._intake.offer(partition, call)
        if len(option_sets) > _MAX_OPTION_SETS and partition.task not in self._warned:
            self._warned.add(partition.task)
            logger.warning(
                "Task %s: more than %d different values of %s wait at once, and calls share a batch only when these "
                "are equal; name options that may differ in per_item",
                partition.task,
                _MAX_OPTION_SETS,
                ", ".join(differing_options(option_sets)),
            )

    def refuse(self, call: Call, error: Exception) -> None:
        """Fail a call that cannot join a batch."""
        if self._hold(call):
            self._store_soon(partial(self._settle_batch, [call], fail_all(error, 1), 0.0))

    def drain_for(self, consumer: Any) -> Drain:
        """Return what fetches whole batches for ``consumer``; all tasks of one consumer share it."""
        if self._drain is None or self._drain.consumer is not consumer:
            self._drain = Drain(consumer)
        return self._drain

    def pump(self) -> None:
        """Run what other threads have left for this one."""
        while self._mailbox:
            try:
                function = self._mailbox.popleft()
            except IndexError:  # another thread was quicker, where there is no event loop
                return
            function()

    def connected(self, channel: Any) -> None:
        """Take up a new connection: acknowledge what could not be over the one before."""
        keep_at_close(channel, self._held_tags)
        self._acks.flush()

    def _held_tags(self) -> set[str]:
        return {message.delivery_tag for call in self._held.values() for message in call.deliveries}

    def stop(self, grace_s: Callable[[], float]) -> None:
        """Finish and settle the running batch within ``grace_s()`` seconds, and hand everything else back.

        ``grace_s`` is asked again and again, so that a second signal can cut the wait short.
        """
        began_at = time.monotonic()
        self._stopping.set()
        self._unstarted.extend(self._intake.close())
        self.pump()
        # What is held and did start is running, or has an outcome that is not acknowledged yet.
        while len(self._held) > len(self._unstarted) and time.monotonic() - began_at < grace_s():
            time.sleep(0.005)
            self.pump()
        self._abandoned.set()
        self._hand_back()
        self._events.flush()
        self.runner.stop(timeout_s=0.1)
        self._store_work.put(None)

    def _hold(self, call: Call) -> bool:
        """Return whether the call is new here. One that was delivered again keeps its place."""
        held = self._held.setdefault(call.id, call)
        if held is call:
            call.request.on_revoked = partial(self._on_revoked, call)
            return True
        held.deliveries += call.deliveries
        return False

    def _hand_back(self) -> None:
        if not self._held:
            return
        # The order of the dict is that in which the calls came.
        messages = [message for call in self._held.values() for message in call.deliveries]
        logger.info("busload: handing %d calls back to their queues", len(self._held))
        self._held.clear()
        self._acks.hand_back(messages)

    def _show_started(self, calls: list[Call], started_at: float) -> None:
        for call in calls:
            call.request.time_start = started_at
            call.request.worker_pid = os.getpid()
            state.task_accepted(call.request)
        self._events.started(calls)

    def _finish(self, settled: Settled, run_s: float) -> None:
        ours = [(call, outcome) for call, outcome in settled if self._held.pop(call.id, None) is call]
        for call, outcome in ours:
            call.request.acknowledged = True
            state.task_ready(call.request, successful=not isinstance(outcome, Failed))
        self._acks.acknowledge(message for call, _ in ours for message in call.deliveries)
        self._events.finished(ours, run_s)

    def _let_go(self, calls: list[Call]) -> None:
        """Acknowledge calls whose outcome somebody else has told."""
        for call in calls:
            if self._held.pop(call.id, None) is call:
                call.request.acknowledged = True
                state.task_ready(call.request)
                self._acks.acknowledge(call.deliveries)

    # -- on the runner's threads -----------------------------------------------------------------------

    def admit(self, calls: list[Call]) -> list[Call]:
        """Return the calls of a new batch that shall run: neither revoked nor, when redelivered, done."""
        calls = self.readmit(calls)
        again = [call for call in calls if call.redelivered and is_plain(call)]
        final = self._until_stored(partial(self._settle.final, again)) if again else None
        if not final:
            return calls
        self._post(partial(self._let_go, [call for call in again if call.id in final]))
        return [call for call in calls if call.id not in final]

    def readmit(self, calls: list[Call]) -> list[Call]:
        """Return the calls that have not been revoked, nor expired; none once the worker stops."""
        if self._stopping.is_set():
            self._unstarted.extend(calls)
            return []
        return [call for call in calls if not call.request.revoked()]

    def started(self, run: BatchRun) -> None:
        self._post(partial(self._show_started, run.calls, time.time()))
        if run.task.track_started:
            self._store_soon(partial(self._settle.mark_started, run.calls))

    def finished(self, run: BatchRun) -> None:
        failures = [outcome for outcome in run.outcomes if isinstance(outcome, Failed)]
        self.stats.count(str(run.task.name), len(run.calls), len(failures), run.run_s)
        logger.info(
            "Batch of %s: calls %d, failed %d, %.1f ms",
            run.task.name,
            len(run.calls),
            len(failures),
            run.run_s * 1000,
        )
        for failure in {id(failure.error): failure for failure in failures}.values():
            logger.error("Batch of %s: %r\n%s", run.task.name, failure.error, failure.traceback)
        self._store_soon(partial(self._settle_batch, run.calls, run.outcomes, run.run_s))

    def _on_revoked(self, call: Call, announce: Callable[[], None]) -> None:
        def store() -> None:
            announce()
            self._post(partial(self._let_go, [call]))

        self._store_soon(store)

    # -- on the settling thread ------------------------------------------------------------------------

    def _store(self) -> None:
        while (work := self._store_work.get()) is not None:
            self._until_stored(work)

    def _settle_batch(self, calls: list[Call], outcomes: list[Outcome], run_s: float) -> None:
        settled = [
            (call, outcome)
            for call, outcome in zip(calls, outcomes, strict=True)
            if self._held.get(call.id) is call  # else it was handed back, and is another worker's by now
        ]
        self._post(partial(self._finish, self._settle.settle(settled), run_s))

    def _until_stored(self, function: Callable[[], T]) -> T | None:
        """Try until the result backend takes it; None when the worker has given up, its calls handed back."""
        wait_s = _FIRST_RETRY_S
        while not self._abandoned.is_set():
            try:
                return function()
            except self._away as error:
                logger.warning("busload: the result backend is away, trying again: %r", error)
                self._abandoned.wait(wait_s)
                wait_s = min(2 * wait_s, _LAST_RETRY_S)
        return None

    # -- on any thread ---------------------------------------------------------------------------------

    def _store_soon(self, work: Callable[[], None]) -> None:
        self._store_work.put(work)

    def _post(self, function: Callable[[], None]) -> None:
        self._mailbox.append(function)
        self._call_soon(self.pump)

    def _policy_of(self, partition: Partition) -> Policy:
        task: BatchTask[Any, ..., Any] = self._tasks[partition.task]
        return task.batch_policy
