"""configure(): busload's defaults for an application that stays the user's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Concatenate, Literal, cast, overload

from celery import Celery

from .task import BatchTask, Item, Options, Result, install_steps

if TYPE_CHECKING:

    class BatchingCelery(Celery):
        """A Celery application whose ``task`` decorator knows the types of batched tasks."""

        @overload
        def task(
            self, *, base: type[BatchTask[Any, ..., Any]], bind: Literal[False] = False, **options: Any
        ) -> Callable[
            [Callable[Concatenate[list[Item], Options], Sequence[Result]]], BatchTask[Item, Options, Result]
        ]: ...
        @overload
        def task(
            self, *, base: type[BatchTask[Any, ..., Any]], bind: Literal[True], **options: Any
        ) -> Callable[
            [Callable[Concatenate[Any, list[Item], Options], Sequence[Result]]],
            BatchTask[Item, Options, Result],
        ]: ...
        @overload
        def task(self, *args: Any, **options: Any) -> Any: ...
        def task(self, *args: Any, **options: Any) -> Any: ...


DEFAULTS = {
    # Flower shows batched tasks from their events.
    "worker_send_task_events": True,
    # Results are read once and soon; a task may say otherwise with result_ttl_s.
    "result_expires": 3600,
    "broker_connection_retry_on_startup": True,
}


def configure(app: Celery) -> BatchingCelery:
    """Give ``app`` busload's defaults and return it.

    Every setting may be overridden by the application. Workers check the settings that are in force when they
    start, and refuse those that would lose work or break batches.
    """
    app.add_defaults(DEFAULTS)
    install_steps(app)
    return cast("BatchingCelery", app)
