"""CEL-18: with Redis away each request is refused quickly, and all is well again when it is back."""

import logging
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import redis
from apiflask import APIFlask
from celery import Celery, states
from kombu.exceptions import LimitExceeded, OperationalError
from pydantic import SecretStr
from werkzeug.test import TestResponse

from busload.api import Settings, create_app
from busload.api.errors import ApiError, BrokerUnavailable, StorageFull
from busload.api.guard import Guard
from busload.embedded import EmbeddedServer

PROMISED_S = 3.0
CALL = {"input": "a"}


def make_app(server: EmbeddedServer, backend: EmbeddedServer | None = None) -> APIFlask:
    url = SecretStr(server.url)
    return create_app(Settings(broker_url=url, result_backend=None if backend is None else SecretStr(backend.url)))


def submit(app: APIFlask) -> TestResponse:
    return app.test_client().post("/v1/tasks/embed", json=CALL)


def submit_until_accepted(app: APIFlask) -> TestResponse:
    # The test's own timeout is the bound.
    while (answer := submit(app)).status_code == 503:
        pass
    return answer


def timed_submit(app: APIFlask, together: threading.Barrier) -> tuple[TestResponse, float]:
    together.wait()
    start_s = time.monotonic()
    return submit(app), time.monotonic() - start_s


def health(app: APIFlask, together: threading.Barrier) -> TestResponse:
    together.wait()
    return app.test_client().get("/healthz")


def assert_away(answer: TestResponse, code: str = "backend_unavailable") -> None:
    assert (answer.status_code, answer.json["error"]["code"]) == (503, code)
    assert answer.headers["Retry-After"] == "1"


def assert_fifty_are_refused_in_time(app: APIFlask) -> None:
    together = threading.Barrier(60)
    with ThreadPoolExecutor(60) as pool:
        submits = [pool.submit(timed_submit, app, together) for _ in range(50)]
        probes = [pool.submit(health, app, together) for _ in range(10)]
    for answer, took_s in (future.result() for future in submits):
        assert_away(answer)
        assert took_s < PROMISED_S
    assert {future.result().status_code for future in probes} == {200}


@pytest.mark.parametrize("warm", [True, False], ids=["warm", "cold"])
def test_fifty_calls_while_redis_is_frozen(fragile: EmbeddedServer, warm: bool) -> None:
    app = make_app(fragile)
    if warm:
        assert submit(app).status_code == 202
    fragile.pause()
    assert_fifty_are_refused_in_time(app)
    assert_fifty_are_refused_in_time(app)
    fragile.resume()
    assert submit_until_accepted(app).status_code == 202


@pytest.mark.parametrize("warm", [True, False], ids=["warm", "cold"])
def test_fifty_calls_while_redis_is_down(fragile: EmbeddedServer, warm: bool) -> None:
    app = make_app(fragile)
    if warm:
        assert submit(app).status_code == 202
    fragile.kill()
    assert_fifty_are_refused_in_time(app)
    fragile.restart()
    assert submit(app).status_code == 202


def test_frozen_and_then_replaced(fragile: EmbeddedServer) -> None:
    app = make_app(fragile)
    assert submit(app).status_code == 202
    fragile.pause()
    assert_away(submit(app))
    fragile.kill()
    fragile.restart()
    assert submit_until_accepted(app).status_code == 202


def test_a_restart_between_calls_goes_unnoticed(fragile: EmbeddedServer) -> None:
    app = make_app(fragile)
    assert submit(app).status_code == 202
    fragile.restart()
    assert submit(app).status_code == 202


@pytest.mark.parametrize("how", ["pause", "kill"])
def test_results_are_read_while_only_the_broker_is_away(
    fragile: EmbeddedServer, server: EmbeddedServer, store: redis.Redis, how: str
) -> None:
    app = make_app(fragile, backend=server)
    href = submit(app).json["href"]
    getattr(fragile, how)()
    for _ in range(3):
        assert_away(submit(app), "broker_unavailable")
        assert app.test_client().get(href).status_code == 200
    if how == "pause":
        fragile.resume()
        assert submit_until_accepted(app).status_code == 202
    else:
        fragile.restart()
        assert submit(app).status_code == 202


def test_reading_results_is_refused_too(fragile: EmbeddedServer) -> None:
    app = make_app(fragile)
    fragile.kill()
    assert_away(app.test_client().get("/v1/results/x"))
    # What needs no Redis is still answered.
    assert app.test_client().get("/v1/results/x x").status_code == 400


def test_full_redis_is_507_and_results_are_still_read(fragile: EmbeddedServer) -> None:
    app = make_app(fragile)
    worker = Celery(backend=fragile.url, set_as_current=False)
    worker.backend.store_result("done", 5, states.SUCCESS)
    with fragile.client() as admin:
        admin.config_set("maxmemory", "1")
        answer = submit(app)
        assert (answer.status_code, answer.json["error"]["code"]) == (507, "storage_full")
        assert app.test_client().get("/v1/results/done").json["result"] == 5
        admin.config_set("maxmemory", "0")
    assert submit(app).status_code == 202


def test_full_broker_is_507(fragile: EmbeddedServer, server: EmbeddedServer, store: redis.Redis) -> None:
    app = make_app(fragile, backend=server)
    with fragile.client() as admin:
        admin.config_set("maxmemory", "1")
    answer = submit(app)
    assert (answer.status_code, answer.json["error"]["code"]) == (507, "storage_full")


def test_passwords_stay_out_of_answers_and_logs(caplog: pytest.LogCaptureFixture) -> None:
    app = create_app(Settings(broker_url=SecretStr("redis://:hunter2@127.0.0.1:1/0")))
    with caplog.at_level(logging.DEBUG):
        answer = submit(app)
    assert_away(answer)
    assert "result backend unavailable" in caplog.text
    assert "hunter2" not in caplog.text + answer.text


class Service:
    """Fails as told; ``ping`` blocks until the test lets it answer."""

    def __init__(self) -> None:
        self.answers = threading.Event()
        self.guard = Guard("broker", BrokerUnavailable, self.ping)

    def ping(self) -> None:
        self.answers.wait()

    def fail(self, error: Exception) -> None:
        with self.guard():
            raise error

    def call(self) -> None:
        with self.guard():
            pass


def wrapped(cause: Exception) -> OperationalError:
    error = OperationalError(str(cause))
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    "error",
    [
        redis.ConnectionError("refused"),
        redis.BusyLoadingError("LOADING Redis is loading the dataset in memory"),
        redis.AuthenticationError("WRONGPASS"),
        redis.ReadOnlyError("READONLY"),
        redis.ResponseError("MISCONF Redis is configured to save RDB snapshots"),
        redis.ResponseError("NOREPLICAS Not enough good replicas to write."),
        LimitExceeded(16),
        ConnectionResetError(),
        OperationalError("of some broker"),
        wrapped(redis.ConnectionError("refused")),
    ],
    ids=repr,
)
def test_a_refusal_is_503_and_the_next_call_goes_through(error: Exception) -> None:
    service = Service()
    with pytest.raises(BrokerUnavailable):
        service.fail(error)
    service.call()


@pytest.mark.parametrize("error", [redis.TimeoutError(), TimeoutError(), wrapped(redis.TimeoutError())], ids=repr)
def test_after_a_timeout_calls_are_refused_until_a_ping_is_answered(error: Exception) -> None:
    service = Service()
    with pytest.raises(BrokerUnavailable):
        service.fail(error)
    for _ in range(3):
        with pytest.raises(BrokerUnavailable):
            service.call()
    [pinging] = [thread for thread in threading.enumerate() if thread.name == "ping-broker"]
    service.answers.set()
    pinging.join()
    service.call()


@pytest.mark.parametrize("error", [redis.OutOfMemoryError("OOM"), wrapped(redis.OutOfMemoryError("OOM"))], ids=repr)
def test_out_of_memory_is_507(error: Exception) -> None:
    with pytest.raises(StorageFull):
        Service().fail(error)


@pytest.mark.parametrize("error", [redis.ResponseError("WRONGTYPE"), ValueError("a bug")], ids=repr)
def test_other_errors_are_not_hidden(error: Exception) -> None:
    with pytest.raises(type(error)) as raised:
        Service().fail(error)
    assert not isinstance(raised.value, ApiError)


def test_the_log_tells_of_changes_only(caplog: pytest.LogCaptureFixture) -> None:
    service = Service()
    for _ in range(3):
        with pytest.raises(BrokerUnavailable):
            service.fail(redis.ConnectionError("refused"))
    service.call()
    service.call()
    assert [record.message for record in caplog.records] == [
        "broker unavailable: ConnectionError: refused",
        "broker answers again",
    ]
