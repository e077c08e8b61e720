"""The Strategy: what Celery's consumer does with each message of a batched task."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
from celery import Celery
from celery.exceptions import InvalidTaskError
from celery.utils.log import get_logger
from celery.worker.state import task_reserved
from celery.worker.strategy import default
from kombu.exceptions import ContentDisallowed, DecodeError
from kombu.message import Message

from ..tasks.task import BatchTask
from .pipeline import Pipeline
from .request import BatchRequest, Call, Partition

logger = get_logger(__name__)

Handler = Callable[..., Any]


class BatchStrategy:
    """Handles messages as Celery's default strategy does, except that a request goes to a batch, not the pool.

    So both message protocols, ETA, expiry, revokes, signals and events are Celery's own.
    """

    def __new__(cls, task: BatchTask[Any, ..., Any], app: Celery, consumer: Any) -> Handler:  # type: ignore[misc]
        pipeline = consumer.controller.batch_pipeline
        if pipeline is None:
            return partial(_turn_away, consumer)
        receive = default(task, app, _ToBatch(consumer, task, pipeline))
        drain, queue = pipeline.drain(consumer), task.queue_name

        def handle(message: Message, body: Any, ack: Any, reject: Any, callbacks: Any) -> None:
            try:
                receive(message, body, ack, reject, callbacks)
            except (InvalidTaskError, ContentDisallowed, DecodeError):
                raise
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                # Celery would take a KeyError for a lost connection and fetch the message again, for ever.
                raise InvalidTaskError(f"the message cannot be read: {error!r}") from error
            finally:
                drain.soon(queue)

        return handle


def _turn_away(consumer: Any, message: Message, *rest: Any) -> None:
    """Put back a batched call that reached a worker which was not started for such, and take no more."""
    queue = message.delivery_info["routing_key"]
    logger.error("busload: queue %s has batched tasks; consume it with -P threads -c 1. Giving it up.", queue)
    consumer.call_soon(consumer.cancel_task_queue, queue)
    message.reject_log_error(logger, consumer.connection_errors, requeue=True)


class _ToBatch:
    """Celery's consumer as its default strategy sees it, with the way to the pool turned to the pipeline."""

    # A task that is refused rate limits at declaration can be given one by remote control; it has no meaning.
    disable_rate_limits = True

    def __init__(self, consumer: Any, task: BatchTask[Any, ..., Any], pipeline: Pipeline) -> None:
        self._consumer = consumer
        self._task = task
        self._pipeline = pipeline

    def __getattr__(self, name: str) -> Any:
        return getattr(self._consumer, name)

    def on_task_request(self, request: BatchRequest) -> None:
        call = Call(request, self._task, deliveries=[request.message])
        signature = self._task.call_signature
        try:
            signature.check(request.args, request.kwargs)
            signature.check_item(request.args[0])
        except TypeError as error:
            self._pipeline.refuse(call, error)
            return
        call.item = request.args[0]
        call.shared, call.own = signature.split(request.kwargs)
        options = msgspec.json.encode(call.shared, order="deterministic")
        self._pipeline.accept(call, Partition(str(self._task.name), options))

    def apply_eta_task(self, request: BatchRequest) -> None:
        task_reserved(request)
        self.on_task_request(request)
        self._consumer.qos.decrement_eventually()
