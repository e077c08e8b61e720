"""The thread that owns the models, and the one that prepares the next batch for it."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from typing import Any, Protocol

from celery.exceptions import TaskPredicate
from celery.utils.log import get_logger
from kombu.utils.encoding import safe_repr

from ..batching import BatchAborted, Failed, Outcome, fail_all, match_results
from ..tasks import direct
from ..tasks.task import BatchItems, BatchTask, Prepared
from . import crashes
from .devices import choose_device
from .intake import Intake
from .request import Call

logger = get_logger(__name__)


@dataclass(slots=True, eq=False)
class BatchRun:
    """One batch from its forming to its outcomes."""

    task: BatchTask[Any, ..., Any]
    calls: list[Call]
    argument: BatchItems | Prepared | None = None
    error: BaseException | None = None
    """What went wrong in preparing."""
    outcomes: list[Outcome] = field(default_factory=list)
    run_s: float = 0.0

    def options(self) -> dict[str, Any]:
        """Return the keyword arguments of the batch: shared values, and one list for each per-item option."""
        own = {name: [call.own[name] for call in self.calls] for name in self.task.call_signature.per_item}
        return {**self.calls[0].shared, **own}

    def prepare(self, load: Callable[[BatchTask[Any, ..., Any]], Future[Any]]) -> None:
        items = [call.item for call in self.calls]
        try:
            if not self.task.is_loaded:
                load(self.task).result()
            if self.task.is_model:
                with _fresh_connections():
                    self.argument = Prepared(self.task.prepare(items, self.options()))
            else:
                self.argument = BatchItems(items)
        except BaseException as error:  # noqa: BLE001  the batch fails with it, like one that raises in the model
            self.error = error

    def run(self) -> None:
        started_at = time.monotonic()
        try:
            if self.error is not None:
                raise self.error
            options = self.options() if isinstance(self.argument, BatchItems) else {}
            # Through __call__, so that subclasses which wrap it (an application context, say) take part.
            with _fresh_connections():
                results = self.task(self.argument, **options)
            self.outcomes = match_results(results, len(self.calls))
            if any(isinstance(outcome, Failed) for outcome in self.outcomes):
                self.outcomes = list(map(_meant, self.outcomes))
        except BaseException as error:  # noqa: BLE001  every member of the batch gets it; this thread goes on
            self.outcomes = list(map(_meant, fail_all(error, len(self.calls))))
        finally:
            self.argument = None
            self.run_s = time.monotonic() - started_at


def _meant(outcome: Outcome) -> Outcome:
    """Replace errors that would mean something else to Celery, or to this process."""
    if not isinstance(outcome, Failed) or (
        isinstance(outcome.error, Exception) and not isinstance(outcome.error, TaskPredicate)
    ):
        return outcome
    return Failed(BatchAborted(f"the batch function raised {safe_repr(outcome.error)}"), outcome.traceback)


class Riders(Protocol):
    """Whom the runner asks and tells about the calls of a batch, on its own threads."""

    def admit(self, calls: list[Call]) -> list[Call]:
        """Return those that shall run, before the batch is prepared."""
        ...

    def readmit(self, calls: list[Call]) -> list[Call]:
        """Return those that still shall, just before it runs."""
        ...

    def started(self, run: BatchRun) -> None: ...

    def finished(self, run: BatchRun) -> None: ...


class Runner:
    """Runs batches one at a time on one thread, the only one that loads and runs models.

    Another thread prepares the next batch meanwhile: ``prepare`` and ``run_batch`` of a task run side by side.
    """

    def __init__(self, intake: Intake, riders: Riders) -> None:
        self._intake = intake
        self._riders = riders
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=crashes.guard(self._work), name="busload-runner", daemon=True)
        self._preparer = threading.Thread(target=crashes.guard(self._prepare), name="busload-prepare", daemon=True)

    def start(self) -> None:
        self._thread.start()
        self._preparer.start()

    def stop(self, timeout_s: float) -> None:
        """End both threads. The intake must be closed; a call that is stuck is left behind after the timeout."""
        self._stopped.set()
        self._jobs.put(None)
        self._preparer.join(timeout_s)
        self._thread.join(timeout_s)

    def submit(self, function: Callable[[], Any]) -> Future[Any]:
        """Run ``function`` between two batches, on the runner's thread."""
        future: Future[Any] = Future()

        def job() -> None:
            try:
                future.set_result(function())
            except BaseException as error:  # noqa: BLE001  it is the future's to raise
                future.set_exception(error)

        if threading.current_thread() is self._thread:
            job()
        else:
            self._jobs.put(job)
        return future

    def load(self, task: BatchTask[Any, ..., Any]) -> Future[Any]:
        """Load and warm up the model of ``task``."""
        return self.submit(partial(_load, task))

    def call(self, task: BatchTask[Any, ..., Any], item: Any, options: dict[str, Any]) -> Any:
        """Run a direct call of one item, made by any code in this process, and return its result.

        A batch function may call batched tasks itself, but not wait for a thread that does: this thread is busy
        with the function.
        """

        def run() -> Any:
            _load(task)
            with _fresh_connections():
                results = task(BatchItems([item]), **task.call_signature.batch_of_one(options))
            return match_results(results, 1)[0]

        future = self.submit(run)
        while not future.done():
            # A thread of the batch function's own, on which that waits, would keep the process from ending.
            if self._stopped.is_set():
                raise BatchAborted("the worker stopped before the direct call ran")
            wait([future], timeout=0.1)
        return direct.unwrap(future.result())

    def _prepare(self) -> None:
        while (batch := self._intake.take()) is not None:
            calls = self._riders.admit(batch.items)
            if not calls:
                self._intake.batch_dropped()
                continue
            run = BatchRun(calls[0].task, calls)
            began_at = time.monotonic()
            run.prepare(self.load)
            self._intake.stepped("prepare", time.monotonic() - began_at)
            self._jobs.put(partial(self._run, run))

    def _run(self, run: BatchRun) -> None:
        calls = self._riders.readmit(run.calls)
        if not calls:
            self._intake.batch_dropped()
            return
        if len(calls) < len(run.calls):
            run.calls = calls
            run.prepare(self.load)
        self._riders.started(run)
        self._intake.batch_began(str(run.task.name))
        run.run()
        self._intake.batch_done()
        self._riders.finished(run)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()


def _load(task: BatchTask[Any, ..., Any]) -> None:
    if not task.is_loaded:
        task.ensure_loaded(choose_device(task.device) if task.is_model else "cpu")
        task.warm_up()


@contextmanager
def _fresh_connections() -> Iterator[None]:
    """Do for this thread what Django does around each request, in an application that uses Django."""
    settings = sys.modules.get("django.conf")
    if settings is None or not settings.settings.configured:
        yield
        return
    from django.core.cache import close_caches
    from django.db import close_old_connections

    close_old_connections()
    try:
        yield
    finally:
        close_old_connections()
        close_caches()
