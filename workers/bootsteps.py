"""busload in Celery's worker: checked at start, stopped before the consumer closes."""

from __future__ import annotations

import gc
import os
import sys
import threading
from concurrent.futures import wait
from functools import partial
from typing import Any

import redis
from celery import bootsteps, signals
from celery.backends.redis import RedisBackend
from celery.exceptions import WorkerTerminate
from celery.utils.functional import noop
from celery.utils.log import get_logger
from celery.worker import WorkController, state
from celery.worker.components import Pool
from celery.worker.consumer.events import Events as EventsStep
from celery.worker.consumer.tasks import Tasks as TasksStep
from kombu.common import ignore_errors

from ..batching import Policy
from ..tasks import direct
from ..tasks.registry import Registry
from ..tasks.task import BatchTask, batch_tasks
from . import control as control  # registers the remote control commands
from .checks import prefetch_count, refusals, runs_on_threads, server_refusal, warnings
from .events import EVENTS_PER_MESSAGE
from .pipeline import Pipeline
from .transport import LeasedChannel, is_redis, leased

logger = get_logger(__name__)

DEFAULT_GRACE_S = 25.0
PUBLISH_RETRY_S = 5.0
SWITCH_INTERVAL_S = 0.0005


class BatchWorkerStep(bootsteps.StartStopStep):
    """Owns the pipeline: builds it, loads the models before the first message, and stops it without loss."""

    label = "busload"
    requires = (Pool,)

    def __init__(self, worker: WorkController, **kwargs: Any) -> None:
        worker.batch_pipeline = None
        super().__init__(worker, **kwargs)

    def include_if(self, worker: WorkController) -> bool:
        """Take part where batched tasks may come: their queues are consumed, or may be added by remote control."""
        tasks = _served_tasks(worker)
        return bool(tasks) or (bool(batch_tasks(worker.app)) and runs_on_threads(worker))

    def create(self, worker: WorkController) -> None:
        app = worker.app
        self._served = _served_tasks(worker)
        if self._served:
            refused = list(refusals(worker, self._served))
            for line in refused:
                print(f"busload: {line}", file=sys.stderr)  # noqa: T201  logging is not set up yet
            if refused:
                raise WorkerTerminate(os.EX_CONFIG)
            worker.prefetch_multiplier = prefetch_count(worker, self._served)
        self._pipeline = worker.batch_pipeline = Pipeline(
            app, worker.hostname, lambda: worker.consumer, partial(_policies_of, worker)
        )
        self._direct_calls = direct.calls_go_through(self._pipeline.runner.call)
        self._hub = worker.hub
        signals.worker_shutting_down.connect(self._wake_loop, sender=worker.hostname)

    def start(self, worker: WorkController) -> None:
        for line in warnings(self._served):
            logger.warning("busload: %s", line)
        if not self._served:
            queues = {str(task.name): task.queue_name for task in batch_tasks(worker.app)}
            logger.warning("busload: this worker consumes none of the queues of its batched tasks: %s", queues)
        self._pipeline.start()
        self._direct_calls.__enter__()
        for task in self._served:
            loading = self._pipeline.runner.load(task)
            while not wait([loading], timeout=0.1).done:
                state.maybe_shutdown()
            loading.result()
        # What is loaded stays. Else each full collection stops every thread to look through all of it.
        gc.freeze()
        # The runner waits no longer than this for the threads that fetch and settle, when its model is done.
        sys.setswitchinterval(SWITCH_INTERVAL_S)

    def _wake_loop(self, **kwargs: Any) -> None:
        """Let the event loop see a signal to stop at once, where it would sleep on for up to two seconds."""
        if self._hub is not None:
            # From another thread, for only then is a sleeping loop woken.
            threading.Thread(target=self._hub.call_soon, args=(noop,), daemon=True).start()

    def close(self, worker: WorkController) -> None:
        """Stop before Celery closes the consumer, whose connection still acknowledges and hands back."""
        task_consumer = getattr(worker.consumer, "task_consumer", None)
        if task_consumer is not None:
            ignore_errors(worker.consumer, task_consumer.cancel)
        self._pipeline.stop(lambda: _grace_s(worker))
        self._direct_calls.__exit__(None, None, None)

    def stop(self, worker: WorkController) -> None:
        """Do nothing more: close() has stopped the pipeline."""

    terminate = stop


class BatchConsumerStep(bootsteps.StartStopStep):
    """Acts on every new connection to the broker."""

    label = "busload"
    requires = (EventsStep, TasksStep)

    def create(self, consumer: Any) -> None:
        self._drain = consumer.controller.batch_pipeline.drain
        connect = consumer.app.connection_for_read

        def connection_for_read(heartbeat: float | None = None) -> Any:
            connection = connect(heartbeat=heartbeat)
            if not is_redis(connection) or consumer.app.conf.get("busload_receive", "drain") != "drain":
                return consumer.ensure_connected(connection)
            connection = consumer.ensure_connected(leased(connection, self._drain))
            if refusal := server_refusal(connection.default_channel.client):
                logger.critical("busload: %s", refusal)
                raise SystemExit(os.EX_CONFIG)
            return connection

        consumer.connection_for_read = connection_for_read

    def include_if(self, consumer: Any) -> bool:
        return consumer.controller is not None and getattr(consumer.controller, "batch_pipeline", None) is not None

    def start(self, consumer: Any) -> None:
        if consumer.event_dispatcher is not None:
            consumer.event_dispatcher.buffer_limit = EVENTS_PER_MESSAGE
        channel = consumer.task_consumer.channel
        if isinstance(channel, LeasedChannel):
            self._drain.connected(channel)
        _publish_specs(consumer)

    def stop(self, consumer: Any) -> None:
        """Do nothing: what is held is settled over the next connection."""


def _publish_specs(consumer: Any) -> None:
    """Tell the API about the tasks, now or as soon as the result backend takes it."""
    backend = consumer.app.backend
    if not isinstance(backend, RedisBackend):
        return
    served = [(task, task.queue_name) for task in _served_tasks(consumer.controller)]
    try:
        Registry(backend).publish(task.spec(queue) for task, queue in served if queue is not None)
    except redis.RedisError as error:
        logger.warning("busload: the API does not know this worker's tasks yet, trying again: %r", error)
        consumer.timer.call_after(PUBLISH_RETRY_S, _publish_specs, (consumer,))


def _served_tasks(worker: WorkController) -> list[BatchTask[Any, ..., Any]]:
    """Return the batched tasks whose calls this worker consumes.

    Where an application's routes do not tell without a call, a worker on the threads pool is taken to be meant.
    """
    queues = worker.app.amqp.queues.consume_from
    return [
        task
        for task in batch_tasks(worker.app)
        if (runs_on_threads(worker) if task.queue_name is None else task.queue_name in queues)
    ]


def _policies_of(worker: WorkController, queue: str) -> list[Policy]:
    """Return the policies of the tasks whose calls come by ``queue``; none where that is not a queue of tasks."""
    if queue not in worker.app.amqp.queues.consume_from:
        return []
    return [task.batch_policy for task in _served_tasks(worker) if task.queue_name in (queue, None)]


def _grace_s(worker: WorkController) -> float:
    """Return how long the running batch may take to finish: no time in a cold shutdown or after a crash."""
    is_cold = state.should_terminate is not None and state.should_terminate is not False
    if is_cold or state.should_stop == os.EX_SOFTWARE:
        return 0.0
    return float(worker.app.conf.get("busload_shutdown_grace_s", DEFAULT_GRACE_S))
