"""A worker's way from message to outcome: intake, runner, settling and acknowledging.

The consumer's thread takes messages and acknowledges them; one thread prepares, one runs, one settles.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar

from celery import Celery
from celery.utils.log import get_logger
from celery.worker import state
from celery.worker.request import Request

from ..batching import Failed, Outcome, Policy, fail_all
from ..tasks.task import BatchTask
from . import crashes
from .acks import Acks, messages_of
from .decode import Headers
from .drain import Drain
from .events import Events
from .intake import Intake
from .leases import new_incarnation
from .receiver import Receiver
from .request import BatchRequest, Call, Partition, differing_options
from .runner import BatchRun, Runner
from .settle import Settled, away_errors, make_settle
from .stats import BatchStats
from .transport import leased_tag

logger = get_logger(__name__)

T = TypeVar("T")

_FIRST_RETRY_S = 0.05
_LAST_RETRY_S = 1.0
_MAX_OPTION_SETS = 32
# How long monitors and remote control may wait to learn of calls while many come: each waking costs as much as a call.
_PUMP_S = 0.05


class Pipeline:
    """Holds every call from its message until that is let go.

    ``consumer()`` is Celery's, with the connection of the moment; ``policies_of`` gives the policies of the tasks
    whose calls come by a queue that is to be drained, none for other queues. Results are stored before messages are
    let go, so a crash at any point leaves a message that will be delivered again.
    """

    def __init__(
        self,
        app: Celery,
        hostname: str,
        consumer: Callable[[], Any],
        policies_of: Callable[[str], list[Policy]],
    ) -> None:
        self.stats = BatchStats()
        self.intake = Intake(self._policy_of, changed=lambda: self.drain.wake())
        self.runner = Runner(self.intake, self)
        self.drain = Drain(self.intake, Receiver(app, consumer, self), policies_of, new_incarnation(hostname))
        self._consumer = consumer
        self._revoked = self._on_revoked
        self._tasks = app.tasks
        self._acks = Acks(consumer, self.drain)
        self._settle = make_settle(app, hostname, self._acks, self.drain)
        self._events = Events(lambda: getattr(consumer(), "event_dispatcher", None))
        self._away = away_errors(app)
        self._held: dict[str, Call] = {}
        self._unstarted: deque[Call] = deque()
        self._mailbox: deque[Callable[[], None]] = deque()
        self._store_work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._settler = threading.Thread(target=crashes.guard(self._store), name="busload-settle", daemon=True)
        self._stopping = threading.Event()
        self._abandoned = threading.Event()
        self._warned: set[str] = set()
        self._pumps_at = -math.inf
        self.bare_partitions: dict[str, Partition] = {}
        """The partition of calls without options, by task: what most calls are."""

    # -- on the thread that receives: the consumer's or the drain's ------------------------------------

    def accept(self, call: Call, partition: Partition) -> None:
        """Let one call that Celery received wait for its batch."""
        self.accept_all([(partition, call)], time.monotonic())

    def accept_all(self, calls: Iterable[tuple[Partition, Call]], first_seen_at: float) -> None:
        """Let calls wait for their batches as if they had come at ``first_seen_at``."""
        held = [(partition, call) for partition, call in calls if self._hold(call)]
        option_sets: dict[str, list[Partition]] = {}
        for partition in self.intake.offer_all(held, first_seen_at):
            option_sets.setdefault(partition.task, []).append(partition)
        for task, partitions in option_sets.items():
            if len(partitions) > _MAX_OPTION_SETS and task not in self._warned:
                self._warned.add(task)
                logger.warning(
                    "Task %s: more than %d different values of %s wait at once, and calls share a batch only when "
                    "these are equal; name options that may differ in per_item",
                    task,
                    _MAX_OPTION_SETS,
                    ", ".join(differing_options(partitions)),
                )

    def refuse(self, call: Call, error: Exception) -> None:
        """Fail a call that cannot join a batch."""
        if self._hold(call):
            self._store_soon(partial(self._settle_batch, [call], fail_all(error, 1), 0.0))

    def received(self, calls: list[tuple[Call, Headers]]) -> None:
        """Tell Celery's worker and its monitors of calls that came by the drain."""
        self.post(partial(self._show_received, calls))

    def _hold(self, call: Call) -> bool:
        """Return whether the call is new here. One that was delivered again keeps its place."""
        call.on_revoked = self._revoked
        held = self._held.setdefault(call.id, call)
        if held is not call:
            held.deliveries += call.deliveries
        return held is call

    # -- on the consumer's thread ----------------------------------------------------------------------

    def start(self) -> None:
        self.runner.start()
        self._settler.start()

    def pump(self) -> None:
        """Run what other threads have left for this one, and look again soon if there was anything."""
        comes_again = bool(self._mailbox) and not self._abandoned.is_set()
        self._pumps_at = time.monotonic() + _PUMP_S if comes_again else -math.inf
        # Looked at only now: who has left something meanwhile has seen when this comes again, or wakes it.
        while self._mailbox:
            try:
                function = self._mailbox.popleft()
            except IndexError:  # another thread was quicker, where there is no event loop
                break
            function()
        self._events.flush()
        if comes_again:
            self._consumer().timer.call_after(_PUMP_S, self.pump)

    def stop(self, grace_s: Callable[[], float]) -> None:
        """Finish and settle the running batch within ``grace_s()`` seconds, and hand everything else back.

        ``grace_s`` is asked again and again, so that a second signal can cut the wait short.
        """
        began_at = time.monotonic()
        self._stopping.set()
        self.drain.stop()
        self._unstarted.extend(self.intake.close())
        self.pump()
        while self._is_busy() and time.monotonic() - began_at < grace_s():
            time.sleep(0.005)
            self.pump()
        self._abandoned.set()
        self._hand_back()
        self._events.flush()
        self.runner.stop(timeout_s=0.1)
        self._store_work.put(None)

    def _is_busy(self) -> bool:
        """Whether something that has begun is not settled yet: a batch, or a plain task under the lease."""
        if len(self._held) > len(self._unstarted):
            return True
        return any(
            isinstance(request, Request)
            and not isinstance(request, BatchRequest)
            and leased_tag(request.message.delivery_tag) is not None
            for request in set(state.reserved_requests)
        )

    def _hand_back(self) -> None:
        # The order of the dict is that in which the calls came.
        calls = list(self._held.values())
        if calls:
            logger.info("busload: handing %d calls back to their queues", len(calls))
        self._held.clear()
        self._acks.hand_back(calls)

    def _show_received(self, calls: list[tuple[Call, Headers]]) -> None:
        held = [call for call, _ in calls if self._held.get(call.id) is call]
        state.requests.update((call.id, call) for call in held)
        state.reserved_requests.update(held)
        self._events.received(calls)

    def _show_started(self, calls: list[Call], started_at: float) -> None:
        for call in calls:
            call.note_start(started_at)
        state.total_count[calls[0].name] += len(calls)
        state.all_total_count[0] += len(calls)
        self._events.started(calls)

    def _show_finished(self, calls: list[Call], settled: Settled, run_s: float) -> None:
        """Close the books on calls that are out of our hands, of which ``settled`` are those that we have settled."""
        entries = []
        for call in calls:
            call.note_end()
            state.requests.pop(call.id, None)
            entries.append(call.entry)
        state.active_requests.difference_update(entries)
        state.reserved_requests.difference_update(entries)
        self._events.finished(settled, run_s)

    # -- on the runner's threads -----------------------------------------------------------------------

    def admit(self, calls: list[Call]) -> list[Call]:
        """Return the calls of a new batch that shall run: still ours, neither revoked nor done already."""
        calls = self.readmit(calls)
        final = self._until_stored(partial(self._settle.final, calls)) if calls else None
        if not final:
            return calls
        done = [call for call in calls if call.id in final]
        self._store_soon(partial(self._let_go, done))
        return [call for call in calls if call.id not in final]

    def readmit(self, calls: list[Call]) -> list[Call]:
        """Return the calls that are still ours and neither revoked nor expired; none once the worker stops."""
        if self._stopping.is_set():
            self._unstarted.extend(calls)
            return []
        ours = self._until_stored(partial(self._acks.still_ours, calls))
        if ours is None:
            return []
        if len(ours) < len(calls):
            self._forget([call for call in calls if call not in ours])
        some_are_revoked = len(state.revoked) > 0
        return [call for call in ours if not ((some_are_revoked or call.may_expire) and call.is_revoked())]

    def started(self, run: BatchRun) -> None:
        # Not on this thread, whose time is the model's; nor later, for a soft shutdown waits only for what is active.
        self._store_soon(partial(self._activate, run.calls))
        self.post(partial(self._show_started, run.calls, time.time()))
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
            self._let_go([call])

        self._store_soon(store)

    # -- on the settling thread ------------------------------------------------------------------------

    def _store(self) -> None:
        while (work := self._store_work.get()) is not None:
            self._until_stored(work)

    def _settle_batch(self, calls: list[Call], outcomes: list[Outcome], run_s: float) -> None:
        ours = [
            (call, outcome)
            for call, outcome in zip(calls, outcomes, strict=True)
            if self._held.get(call.id) is call  # else it was handed back, and is another worker's by now
        ]
        settled = self._settle.settle(ours)
        if len(settled) < len(ours):
            logger.warning("busload: %d calls were no longer ours to settle", len(ours) - len(settled))
        self._forget([call for call, _ in ours], settled, run_s)

    def _activate(self, calls: list[Call]) -> None:
        state.active_requests.update([call.entry for call in calls])

    def _let_go(self, calls: list[Call]) -> None:
        """Let go of calls whose outcome somebody else has told."""
        self._acks.release(calls)
        self._forget(calls)

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

    def post(self, function: Callable[[], None]) -> None:
        """Run ``function`` on the consumer's thread, soon: at once, or with what comes right after."""
        self._mailbox.append(function)
        if time.monotonic() > self._pumps_at:
            self._consumer().call_soon_ack(self.pump)

    def _forget(self, calls: list[Call], settled: Settled | None = None, run_s: float = 0.0) -> None:
        gone = [call for call in calls if self._held.pop(call.id, None) is call]
        self.drain.made_room()
        if messages_of(gone):
            self._consumer().call_soon_ack(partial(self._acks.acknowledge, gone))
        self.post(partial(self._show_finished, gone, settled or [], run_s))

    def _store_soon(self, work: Callable[[], None]) -> None:
        self._store_work.put(work)

    def _policy_of(self, partition: Partition) -> Policy:
        task: BatchTask[Any, ..., Any] = self._tasks[partition.task]
        return task.batch_policy
