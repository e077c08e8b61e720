"""How drained messages become calls, many at a time."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from celery import Celery, signals
from celery.app import trace
from celery.utils.functional import noop
from celery.utils.imports import symbol_by_name
from celery.utils.log import get_logger
from celery.worker import strategy
from celery.worker.request import create_request_cls

from ..tasks.task import BatchTask, batch_tasks
from .decode import Headers, decode
from .drain import Messages
from .request import BatchRequest, Call, Partition, embedded_of
from .transport import read_message

if TYPE_CHECKING:
    from .pipeline import Pipeline

logger = get_logger(__name__)


class Receiver:
    """Turns drained messages into calls. What is unusual about a message is left to Celery's own consumer.

    ``consumer()`` is Celery's, with the connection of the moment.
    """

    def __init__(self, app: Celery, consumer: Callable[[], Any], pipeline: Pipeline) -> None:
        self._app = app
        self._consumer = consumer
        self._pipeline = pipeline
        self._tasks = {str(task.name): task for task in batch_tasks(app)}
        self._shows_received = strategy.logger.isEnabledFor(logging.INFO)

    def receive(self, queue: str, messages: Messages, first_seen_at: float) -> None:
        calls: list[tuple[Partition, Call]] = []
        headers_of: list[tuple[Call, Headers]] = []
        unusual = []
        for tag, text in messages:
            decoded = decode(text)
            task = None if decoded is None else self._tasks.get(decoded[0].task)
            if decoded is None or task is None:
                unusual.append((tag, text))
                continue
            headers, arguments = decoded
            call = self._call(tag, text, task, headers, arguments[2])
            headers_of.append((call, headers))
            partition = fill_in(call, arguments[0], arguments[1], self._pipeline)
            if partition is not None:
                calls.append((partition, call))
        if headers_of:
            self._announce(headers_of)
        self._pipeline.accept_all(calls, first_seen_at)
        if unusual:
            self._pipeline.post(partial(self._leave_to_celery, queue, unusual))

    def _call(
        self, tag: int, text: bytes, task: BatchTask[Any, ..., Any], headers: Headers, embedded: dict[str, Any]
    ) -> Call:
        ignores = headers.ignore_result
        return Call(
            id=headers.id,
            task=task,
            deliveries=[tag],
            embedded=embedded_of(embedded),
            make_request=partial(self._make_request, tag, text, task),
            group=headers.group,
            parent_id=headers.parent_id,
            ignore_result=bool(task.ignore_result if ignores is None else ignores),
            # Only Celery's request knows about these.
            redelivered=headers.redelivered,
            may_expire=headers.expires is not None or headers.stamped_headers is not None,
        )

    def _make_request(self, tag: int, text: bytes, task: BatchTask[Any, ..., Any]) -> BatchRequest:
        consumer = self._consumer()
        eventer = consumer.event_dispatcher
        request_class = create_request_cls(
            symbol_by_name(task.Request), task, consumer.pool, consumer.hostname, eventer, app=self._app
        )
        message = read_message(tag, text, consumer.task_consumer.channel)
        request: BatchRequest = request_class(
            message,
            on_ack=noop,
            on_reject=noop,
            app=self._app,
            hostname=consumer.hostname,
            eventer=eventer,
            task=task,
            connection_errors=consumer.connection_errors,
            body=message.body,
            headers=message.headers,
        )
        return request

    def _announce(self, received: list[tuple[Call, Headers]]) -> None:
        if self._shows_received:
            for call, headers in received:
                context = {
                    "id": call.id,
                    "name": headers.task,
                    "args": headers.argsrepr,
                    "kwargs": headers.kwargsrepr,
                    "eta": None,
                }
                strategy.logger.info(trace.LOG_RECEIVED, context, extra={"data": context})
        if signals.task_received.receivers:
            for call, _ in received:
                signals.task_received.send(sender=self._consumer(), request=call.request)
        self._pipeline.received(received)

    def _leave_to_celery(self, queue: str, messages: Messages) -> None:
        """Receive messages as Celery does, on its thread."""
        task_consumer = self._consumer().task_consumer
        for tag, text in messages:
            if task_consumer is None or not task_consumer.consuming_from(queue):
                self._pipeline.drain.hand_back(tag)
                continue
            try:
                message = read_message(tag, text, task_consumer.channel)
            except Exception as error:  # noqa: BLE001  whatever a codec raises
                # As Celery does with what it cannot decode, or it would come back for ever.
                logger.critical("busload: dropping a message that cannot be read: %r\n%.500r", error, text)
                self._pipeline.drain.release(tag)
                continue
            task_consumer._receive_callback(message)


def fill_in(call: Call, args: list[Any], kwargs: dict[str, Any], pipeline: Pipeline) -> Partition | None:
    """Give the call its item and options; None when it was refused for what these are."""
    signature = call.task.call_signature
    try:
        signature.check(args, kwargs)
        signature.check_item(args[0])
    except TypeError as error:
        pipeline.refuse(call, error)
        return None
    call.item = args[0]
    call.shared, call.own = signature.split(kwargs)
    if kwargs:
        return Partition.of(call.name, call.shared)
    partition = pipeline.bare_partitions.get(call.name)
    if partition is None:
        partition = pipeline.bare_partitions[call.name] = Partition.of(call.name, call.shared)
    return partition
