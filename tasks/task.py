"""BatchTask: the Celery task whose calls ride together."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar, cast

import redis
from celery.app.task import Task
from celery.exceptions import ImproperlyConfigured
from celery.utils.log import get_logger
from kombu.exceptions import OperationalError

from ..batching import Policy, make_policy, match_results
from . import direct
from .errors import BrokerFull
from .registry import TaskSpec
from .signature import CallSignature

Item = TypeVar("Item")
Result = TypeVar("Result")
Options = ParamSpec("Options")

logger = get_logger(__name__)

if TYPE_CHECKING:
    from celery import Celery
    from celery.result import AsyncResult

    class _Base(Task, Generic[Item, Options, Result]): ...
else:
    _Base = Task

WORKER_STEP = "busload.workers.bootsteps:BatchWorkerStep"
CONSUMER_STEP = "busload.workers.bootsteps:BatchConsumerStep"

_REFUSED = {
    "rate_limit": "a batch is formed from all waiting calls; limit the callers instead",
    "autoretry_for": "a batch that raises fails its calls; catch the error in the function instead",
}


class BatchItems(list[Any]):
    """The items of one batch, as opposed to one item that happens to be a list."""


class Prepared:
    """What ``prepare`` made of one batch, on its way to ``run_batch``."""

    def __init__(self, batch: Any) -> None:
        self.batch = batch


class BatchTask(_Base[Item, Options, Result]):
    """Base class of batched tasks, for ``@app.task(base=BatchTask, ...)`` and for models.

    Function form: the decorated function takes the list of items and returns a list with one result per item,
    in the same order. Class form: subclass and define ``load``, ``prepare`` and ``run_batch``.

    The items of one batch may run again when a worker dies: the function should bear that.
    """

    abstract = True
    Strategy = "busload.workers.consumer:BatchStrategy"
    Request = "busload.workers.request:BatchRequest"
    acks_late = True
    # Arguments are checked below, by the rules of a batch.
    typing = False
    # Results are often long vectors; monitors show their beginning.
    resultrepr_maxsize = 128

    max_batch_size: int = 64
    """The largest number of items in one call of the function."""
    max_wait_ms: float = 50.0
    """How long the oldest item waits for company while the runner is free, in milliseconds."""
    policy: str = "static"
    """When a batch leaves: ``static`` or ``greedy``."""
    per_item: Sequence[str] = ()
    """Options that calls of one batch need not share; the function receives them as lists."""
    result_ttl_s: int | None = None
    """Seconds for which results are kept, 0 for ever; None means the application's ``result_expires``."""
    device: str | None = None
    """Where ``load`` puts the model, such as ``cuda:0``; None lets the worker choose."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # Callers and Celery's tracer call run() with one item, the runner with a batch. So what the user
        # wrote as run() becomes the batch function, and run() stays ours.
        if "run" in cls.__dict__:
            cls.batch_function = cls.__dict__["run"]  # type: ignore[method-assign]
            del cls.run

    # -- the class form ------------------------------------------------------------------------------

    def load(self, device: str) -> None:
        """Load the model onto ``device``. Called once per process, on the runner's thread."""

    def options(self) -> None:
        """Declare the options of the class form: override with keyword-only parameters and no body."""

    def prepare(self, items: list[Any], options: dict[str, Any]) -> Any:
        """Turn items into what ``run_batch`` takes, on the CPU, while the batch before is still running."""
        return items

    def run_batch(self, prepared: Any) -> Sequence[Any]:
        """Run the model once and return one result per item, in the order of the items."""
        raise NotImplementedError(f"{self.name} must define run_batch()")

    def size(self, item: Any, options: dict[str, Any]) -> int:
        """Return the length of one item in tokens."""
        return 1

    def warm_up(self) -> None:
        """Run before the first message is taken; override to run the largest allowed batch."""

    def batch_function(self, items: list[Any], /, **options: Any) -> Sequence[Any]:
        """Run one batch. The decorated function takes the place of this method in the function form."""
        return self.run_batch(self.prepare(items, options))

    # -- calling ---------------------------------------------------------------------------------------

    def run(self, item: Any, /, **options: Any) -> Any:
        """Run what Celery's ``__call__`` hands on: a batch, in one of two forms, or one item.

        A batch comes from the runner. One item is a direct call, or the tracer settling a call whose outcome is
        known.
        """
        if isinstance(item, BatchItems):
            return self.batch_function(list(item), **options)
        if isinstance(item, Prepared):
            return self.run_batch(item.batch)
        if known := direct.known_outcome_of(self.request.id):
            return direct.unwrap(known)
        self.call_signature.check((item,), options)
        self.call_signature.check_item(item)
        if call := direct.worker_call():
            return call(self, item, options)
        self.ensure_loaded(self.device or "cpu")
        results = self.batch_function([item], **self.call_signature.batch_of_one(options))
        return direct.unwrap(match_results(results, 1)[0])

    def ensure_loaded(self, device: str) -> None:
        """Call ``load`` unless this process has done so."""
        with self._loading:
            if not self._loaded:
                self.load(device)
                self._loaded = True

    @property
    def is_loaded(self) -> bool:
        """Whether this process has loaded the model."""
        return self._loaded

    def apply_async(
        self,
        args: Sequence[Any] | None = None,
        kwargs: dict[str, Any] | None = None,
        *positional: Any,
        **options: Any,
    ) -> Any:
        """Send one call; as in Celery, except that TypeError is raised for what the batch cannot take.

        Raises BrokerFull when the broker is out of memory, and kombu's OperationalError when it is away.
        """
        self.call_signature.check(args, kwargs)
        try:
            return super().apply_async(args, kwargs, *positional, **options)
        except OperationalError as error:
            if isinstance(error.__cause__, redis.OutOfMemoryError):
                raise BrokerFull(f"the call was not accepted, for the broker is full: {error}") from error
            raise

    if TYPE_CHECKING:

        def delay(self, item: Item, /, *args: Options.args, **options: Options.kwargs) -> AsyncResult[Result]: ...

        def __call__(self, item: Item, /, *args: Options.args, **options: Options.kwargs) -> Result: ...

    # -- what the worker and the API read --------------------------------------------------------------

    @cached_property
    def call_signature(self) -> CallSignature:
        """The item and options that one call carries."""
        if self.is_model:
            return CallSignature.of_model(type(self).__name__, self.prepare, self.options, self.per_item)
        return CallSignature.of_function(self.batch_function, self.per_item)

    @property
    def is_model(self) -> bool:
        """Whether the task is in the class form, with preparing and running apart."""
        return type(self).batch_function is BatchTask.batch_function

    @cached_property
    def batch_policy(self) -> Policy:
        """The policy that decides when a batch of this task leaves."""
        return make_policy(self.policy, self.max_batch_size, self.max_wait_ms)

    @cached_property
    def queue_name(self) -> str | None:
        """The queue that the application's routes give this task; None when they need the call to tell."""
        options = {"queue": self.queue} if getattr(self, "queue", None) else {}
        try:
            return str(self.app.amqp.router.route(options, self.name, task_type=self)["queue"].name)
        except Exception as error:  # noqa: BLE001  routers are the application's; no stock worker asks them
            logger.info("busload: no telling which queue task %s is routed to: %r", self.name, error)
            return None

    @property
    def result_lifetime_s(self) -> int:
        """Seconds for which a result is kept; 0 keeps it for ever."""
        if self.result_ttl_s is not None:
            return self.result_ttl_s
        return int(self.backend.prepare_expires(self.app.conf.result_expires, type=int) or 0)

    def spec(self, queue: str) -> TaskSpec:
        """Describe the task, whose calls go to ``queue``, to the API."""
        return TaskSpec(
            name=str(self.name),
            queue=queue,
            item_schema=self.call_signature.item_schema(),
            options_schema=self.call_signature.options_schema(),
            max_batch_size=self.max_batch_size,
            max_wait_ms=self.max_wait_ms,
            result_ttl_s=self.result_lifetime_s,
        )

    _loaded = False
    _loading = threading.RLock()

    @classmethod
    def on_bound(cls, app: Celery) -> None:
        """Refuse at declaration what a batch cannot keep, and put busload's steps into the app's workers."""
        if cls.name is None:
            return
        task = cast("BatchTask[Any, ..., Any]", cls())
        for option, why in _REFUSED.items():
            if getattr(cls, option, None):
                raise ImproperlyConfigured(f"task {cls.name}: {option} is not for batched tasks: {why}")
        if cls._dump_pydantic_arguments is not None:
            raise ImproperlyConfigured(
                f"task {cls.name}: pydantic=True is not for batched tasks: it would take the list for one argument"
            )
        if not cls.acks_late:
            raise ImproperlyConfigured(
                f"task {cls.name}: acks_late=False would lose every call that waits when a worker dies"
            )
        ttl_s = cls.result_ttl_s
        if ttl_s is not None and (isinstance(ttl_s, bool) or not isinstance(ttl_s, int) or ttl_s < 0):
            raise ValueError(f"task {cls.name}: result_ttl_s must be a whole number of seconds >= 0, got {ttl_s!r}")
        _ = task.call_signature, task.batch_policy
        cls._loading = threading.RLock()
        install_steps(app)


def install_steps(app: Celery) -> None:
    """Make every worker of ``app`` check its settings, run batches and stop without losing one."""
    app.steps["worker"].add(WORKER_STEP)
    app.steps["consumer"].add(CONSUMER_STEP)


def batch_tasks(app: Celery) -> list[BatchTask[Any, ..., Any]]:
    """Return the batched tasks that ``app`` has registered, by name."""
    return [task for _, task in sorted(app.tasks.items()) if isinstance(task, BatchTask)]
