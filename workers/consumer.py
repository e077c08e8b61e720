"""The Strategy: what Celery's consumer does with each message of a batched task that it receives itself."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from celery import Celery
from celery.exceptions import InvalidTaskError
from celery.utils.log import get_logger
from celery.worker import strategy
from celery.worker.state import task_reserved
from kombu.exceptions import ContentDisallowed, DecodeError
from kombu.message import Message

from ..tasks.task import BatchTask
from .pipeline import Pipeline
from .receiver import fill_in
from .request import BatchRequest, Call
from .transport import leased_tag

logger = get_logger(__name__)

Handler = Callable[..., Any]


class BatchStrategy:
    """Handles messages as Celery's default strategy does, except that a request goes to a batch, not the pool.

    So both message protocols, ETA, expiry, revokes, signals and events are Celery's own.
    """

    # Celery calls what a task names as its Strategy, and takes what comes back as the handler.
    def __new__(cls, task: BatchTask[Any, ..., Any], app: Celery, consumer: Any) -> Handler:  # type: ignore[misc]
        pipeline = consumer.controller.batch_pipeline
        if pipeline is None:
            return partial(_turn_away, consumer)
        receive = strategy.default(task, app, _ToBatch(consumer, task, pipeline))

        def handle(message: Message, body: Any, ack: Any, reject: Any, callbacks: Any) -> None:
            try:
                receive(message, body, ack, reject, callbacks)
            except (InvalidTaskError, ContentDisallowed, DecodeError):
                raise
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                # Celery would take a KeyError for a lost connection and fetch the message again, for ever.
                raise InvalidTaskError(f"the message cannot be read: {error!r}") from error

        return handle


def _turn_away(consumer: Any, message: Message, *rest: Any) -> None:
    """Put back a batched call that reached a worker which was not started for such, and take no more."""
    key = message.delivery_info["routing_key"]
    queues = consumer.task_consumer.queues
    # The message does not say which queue it came by.
    bound = [queue for queue in queues if key in (queue.name, queue.routing_key)]
    for name in [queue.name for queue in bound or queues]:
        logger.error("busload: queue %s has batched tasks; consume it with -P threads -c 1. Giving it up.", name)
        consumer.call_soon(consumer.cancel_task_queue, name)
    message.reject_log_error(logger, consumer.connection_errors, requeue=True)


class _ToBatch:
    """Celery's consumer as its default strategy sees it, with the way to the pool turned to the pipeline."""

    # Batched tasks refuse rate limits when declared; one that is set later, by remote control, is ignored.
    disable_rate_limits = True

    def __init__(self, consumer: Any, task: BatchTask[Any, ..., Any], pipeline: Pipeline) -> None:
        self._consumer = consumer
        self._task = task
        self._pipeline = pipeline

    def __getattr__(self, name: str) -> Any:
        return getattr(self._consumer, name)

    def on_task_request(self, request: BatchRequest) -> None:
        tag = leased_tag(request.message.delivery_tag)
        call = Call.of_request(request, self._task, request.message if tag is None else tag)
        partition = fill_in(call, request.args, request.kwargs, self._pipeline)
        if partition is not None:
            self._pipeline.accept(call, partition)

    def apply_eta_task(self, request: BatchRequest) -> None:
        """Take a request whose ETA has come; the strategy reserves only requests without one."""
        task_reserved(request)
        self.on_task_request(request)
        self._consumer.qos.decrement_eventually()
