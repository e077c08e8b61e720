from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis

from busload.embedded import EmbeddedServer


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedServer]:
    with EmbeddedServer() as server:
        yield server


@pytest.fixture
def client(server: EmbeddedServer) -> Iterator[redis.Redis]:
    """A client of the server, which is empty."""
    with server.client() as client:
        client.flushall()
        yield client
