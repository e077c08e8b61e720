"""BatchTask where it is declared and called, without a worker."""

from __future__ import annotations

import json
from typing import Any

import pytest
from celery import Celery
from celery.exceptions import ImproperlyConfigured

from busload import BatchTask, BrokerFull, ResultCountError, configure
from busload.batching import GreedyPolicy, StaticPolicy
from busload.embedded import EmbeddedServer
from busload.tasks import batch_tasks
from busload.tasks.ready import embed as ready_embed
from busload.tasks.task import CONSUMER_STEP, WORKER_STEP


@pytest.fixture
def app() -> Celery:
    return configure(Celery("declared", broker="memory://", backend="cache+memory://", set_as_current=False))


def declare(app: Celery, **options: Any) -> BatchTask[Any, ..., Any]:
    # Celery shares the tasks of one application with all others of the process unless told not to.
    @app.task(base=BatchTask, name="lengths", shared=False, **options)
    def lengths(texts: list[str], /, *, scale: int = 1) -> list[Any]:
        return [len(text) * scale if text else ValueError("empty") for text in texts]

    return lengths  # type: ignore[no-any-return]


def test_a_direct_call_is_a_batch_of_one(app: Celery) -> None:
    lengths = declare(app)
    assert lengths("abc") == 3
    assert lengths("abc", scale=2) == 6
    with pytest.raises(ValueError, match="empty"):
        lengths("")


def test_eager_calls_give_one_result(app: Celery) -> None:
    lengths = declare(app)
    assert lengths.apply(("abc",), {"scale": 2}).get() == 6
    app.conf.task_always_eager = True
    assert lengths.delay("abc").get() == 3
    failed = lengths.delay("")
    assert (failed.state, str(failed.result)) == ("FAILURE", "empty")


@pytest.mark.parametrize("call", ["delay", "apply_async", "direct", "signature"])
@pytest.mark.parametrize(("args", "options"), [((), {}), (("a", "b"), {}), (("a",), {"speed": 1})])
def test_a_wrong_call_is_a_type_error_for_its_caller(
    app: Celery, call: str, args: tuple[Any, ...], options: dict[str, Any]
) -> None:
    lengths = declare(app)
    calls = {
        "delay": lambda: lengths.delay(*args, **options),
        "apply_async": lambda: lengths.apply_async(args, options),
        "direct": lambda: lengths(*args, **options),
        "signature": lambda: lengths.s(*args, **options).apply_async(),
    }
    with pytest.raises(TypeError):
        calls[call]()


def test_a_missing_result_is_noticed_in_a_direct_call(app: Celery) -> None:
    @app.task(base=BatchTask, name="empty", shared=False)
    def empty(texts: list[str], /) -> list[str]:
        return []

    with pytest.raises(ResultCountError):
        empty("a")


def test_the_function_may_be_bound(app: Celery) -> None:
    @app.task(base=BatchTask, name="bound", shared=False, bind=True)
    def bound(self: Any, texts: list[str], /) -> list[str]:
        return [f"{self.name} {text}" for text in texts]

    assert bound("a") == "bound a"


def test_the_class_form_loads_once_and_prepares_apart(app: Celery) -> None:
    loads: list[str] = []

    class Shout(BatchTask[str, ..., str]):
        name = "shout"
        device = "tpu:3"

        def options(self, *, mark: str = "!") -> None: ...

        def load(self, device: str) -> None:
            loads.append(device)

        def prepare(self, items: list[str], options: dict[str, Any]) -> Any:
            return [item.upper() for item in items], options.get("mark", "!")

        def run_batch(self, prepared: Any) -> list[str]:
            items, mark = prepared
            return [item + mark for item in items]

    shout = app.register_task(Shout())
    assert [shout("a"), shout("b", mark="?")] == ["A!", "B?"]
    assert loads == ["tpu:3"]
    with pytest.raises(TypeError, match=r"Shout\(\) options: .*unknown field `speed`"):
        shout("a", speed=1)
    assert shout.call_signature.item_schema() == {"type": "string"}


def test_a_task_class_with_its_own_call_takes_part(app: Celery) -> None:
    """As in Flask's documentation: the class enters an application context around ``run``."""
    entered: list[str] = []

    class InContext(app.Task):  # type: ignore[name-defined, misc]
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            entered.append("in")
            return self.run(*args, **kwargs)

    class BatchInContext(InContext, BatchTask): ...

    @app.task(base=BatchInContext, name="in_context", shared=False)
    def in_context(texts: list[str], /) -> list[int]:
        return [len(text) for text in texts]

    assert in_context("abc") == 3
    assert entered == ["in"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rate_limit": "10/s"}, "task lengths: rate_limit is not for batched tasks"),
        ({"autoretry_for": (OSError,)}, "task lengths: autoretry_for is not for batched tasks"),
        ({"acks_late": False}, "acks_late=False would lose every call"),
    ],
)
def test_what_a_batch_cannot_keep_is_refused_at_declaration(app: Celery, options: Any, message: str) -> None:
    declare(app, **options)
    with pytest.raises(ImproperlyConfigured, match=message):
        app.finalize()


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"max_batch_size": 0}, ValueError),
        ({"max_wait_ms": -1}, ValueError),
        ({"policy": "eager"}, ValueError),
        ({"per_item": ("speed",)}, TypeError),
    ],
)
def test_a_wrong_declaration_is_an_error(app: Celery, options: Any, error: type[Exception]) -> None:
    declare(app, **options)
    with pytest.raises(error):
        app.finalize()


def test_policies_come_from_the_declaration(app: Celery) -> None:
    assert declare(app, max_batch_size=8, max_wait_ms=20).batch_policy == StaticPolicy(8, 20)
    other = configure(Celery("other", set_as_current=False))
    assert declare(other, policy="greedy").batch_policy == GreedyPolicy(64)


def test_the_application_overrides_our_defaults() -> None:
    app = Celery("own", set_as_current=False)
    app.conf.result_expires = 5
    configure(app)
    app.conf.worker_send_task_events = False
    assert (app.conf.result_expires, app.conf.worker_send_task_events) == (5, False)
    assert app.conf.broker_connection_retry_on_startup is True


def test_declaring_a_batched_task_is_enough_for_the_workers_steps() -> None:
    app = Celery("bare", set_as_current=False)
    declare(app)
    app.finalize()
    assert WORKER_STEP in app.steps["worker"]
    assert CONSUMER_STEP in app.steps["consumer"]
    assert "lengths" in [task.name for task in batch_tasks(app)]


def test_a_task_describes_itself_to_the_api(app: Celery) -> None:
    app.conf.task_routes = {"lengths": {"queue": "gpu"}}
    spec = declare(app, max_batch_size=8, result_ttl_s=60).spec("gpu")
    assert (spec.name, spec.queue, spec.max_batch_size, spec.result_ttl_s) == ("lengths", "gpu", 8, 60)
    assert spec.item_schema == {"type": "string"}


def test_the_ready_task_belongs_to_every_application() -> None:
    first, second = (Celery(name, broker="memory://", set_as_current=False) for name in ("first", "second"))
    assert first.tasks["busload.embed"].app is first
    assert second.tasks["busload.embed"].app is second
    second.set_current()
    assert ready_embed.app is second


def test_the_message_is_what_stock_celery_sends(app: Celery) -> None:
    stock = Celery("stock", broker="memory://", set_as_current=False)
    batched = declare(app)

    @stock.task(name="lengths", shared=False)
    def plain(text: str, scale: int = 1) -> int:
        raise NotImplementedError

    def message(task: Any, client: Celery) -> tuple[Any, Any]:
        task.apply_async(("abc",), {"scale": 2}, task_id="fixed", queue="compared")
        with client.connection_for_read() as connection:
            queue = connection.SimpleQueue("compared")
            received = queue.get(timeout=5)
            received.ack()
            return json.loads(received.body), received.headers

    assert message(batched, app) == message(plain, stock)


def test_a_full_broker_is_named_as_such() -> None:
    with EmbeddedServer() as server, server.client() as client:
        app = configure(Celery("full", broker=server.url, set_as_current=False))

        @app.task(base=BatchTask, name="full.echo", shared=False)
        def echo(items: list[str], /) -> list[str]:
            return items

        client.config_set("maxmemory", "1")
        with pytest.raises(BrokerFull, match="the broker is full"):
            echo.delay("x")
        client.config_set("maxmemory", "0")
        echo.delay("x")
        assert client.llen("celery") == 1
