from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis
from celery import Celery

from busload.embedded import EmbeddedServer
from busload.tasks.registry import Registry, TaskSpec


def spec(name: str, queue: str = "gpu") -> TaskSpec:
    return TaskSpec(
        name=name,
        queue=queue,
        item_schema={"type": "string"},
        options_schema={},
        max_batch_size=64,
        max_wait_ms=50.0,
        result_ttl_s=3600,
    )


@pytest.fixture
def server() -> Iterator[EmbeddedServer]:
    with EmbeddedServer() as server:
        yield server


def registry(server: EmbeddedServer, prefix: str = "") -> Registry:
    app = Celery(backend=server.url, set_as_current=False)
    app.conf.result_backend_transport_options = {"global_keyprefix": prefix} if prefix else {}
    return Registry(app.backend)


def test_specs_are_read_as_they_were_published(server: EmbeddedServer) -> None:
    registry(server).publish([spec("embed"), spec("classify")])
    assert registry(server).get("embed") == spec("embed")
    assert registry(server).get("unknown") is None
    assert registry(server).all() == {"embed": spec("embed"), "classify": spec("classify")}


def test_the_last_spec_of_a_name_counts(server: EmbeddedServer) -> None:
    registry(server).publish([spec("embed")])
    registry(server).publish([spec("embed", queue="other"), spec("new")])
    registry(server).publish([])
    assert registry(server).all() == {"embed": spec("embed", queue="other"), "new": spec("new")}


def test_all_processes_share_one_key(server: EmbeddedServer) -> None:
    key = registry(server).id_key()
    assert len(key) == 32
    assert registry(server).id_key() == key


def test_the_key_is_read_from_a_full_server(server: EmbeddedServer) -> None:
    key = registry(server).id_key()
    with server.client() as client:
        client.config_set("maxmemory", "1")
    assert registry(server).id_key() == key


def test_applications_with_a_prefix_are_apart(server: EmbeddedServer) -> None:
    registry(server, "team_a").publish([spec("embed")])
    assert registry(server, "team_b").all() == {}
    with server.client() as client:
        assert client.keys() == [b"team_a_busload:1:tasks"]


def test_a_server_that_is_away_is_an_error(server: EmbeddedServer) -> None:
    away = registry(server)
    server.stop()
    with pytest.raises(redis.ConnectionError):
        away.get("embed")
