"""Ready tasks: declare them by importing this module, run them in a worker with the ``worker`` extra."""

from __future__ import annotations

from typing import Any, TypeVar, cast

from celery import current_app
from celery._state import _get_active_apps, connect_on_app_finalize
from celery.local import Proxy
from celery.utils.imports import symbol_by_name

from .task import BatchTask

TaskClass = TypeVar("TaskClass", bound=BatchTask[Any, ..., Any])

# Resolved in the worker: this module is for callers too, who have no torch.
_EMBED_MODEL = "busload.workers.models:embed_model"


def shared(task_class: type[TaskClass]) -> TaskClass:
    """Register a class-form task with every Celery application, as ``shared_task`` does with functions.

    Returns a stand-in for the task of the current application.
    """

    def register(app: Any) -> None:
        # Binding changes the class, so each application has its own.
        app.register_task(type(task_class.__name__, (task_class,), {"__module__": task_class.__module__})())

    connect_on_app_finalize(register)
    for app in _get_active_apps():
        if app.finalized:
            register(app)
    return cast("TaskClass", Proxy(lambda: current_app.tasks[task_class.name]))


class Embed(BatchTask[str, ..., list[float]]):
    """Turns a text into a vector with the sentence encoder of the worker.

    The item is a text; one longer than the model can read is cut. An empty text has a vector like any other.
    The result is a list of floats, of length 384 for MiniLM. The option ``normalize`` (True) scales it to
    length 1, so that the dot product of two vectors is their cosine.
    """

    name = "busload.embed"

    def options(self, *, normalize: bool = True) -> None: ...

    def load(self, device: str) -> None:
        self.model = symbol_by_name(_EMBED_MODEL)(device)

    def warm_up(self) -> None:
        self.run_batch(self.prepare(self.model.warm_up_texts(self.max_batch_size), {"normalize": True}))

    def prepare(self, items: list[str], options: dict[str, Any]) -> Any:
        return self.model.tokenize(items), options["normalize"]

    def run_batch(self, prepared: Any) -> list[list[float]]:
        tokens, normalize = prepared
        return self.model.encode(tokens, normalize)  # type: ignore[no-any-return]

    def size(self, item: str, options: dict[str, Any]) -> int:
        return self.model.count_tokens(item)  # type: ignore[no-any-return]


embed = shared(Embed)
