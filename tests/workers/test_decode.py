"""Messages read by schema agree with Celery's own reading, or are left to it."""

from __future__ import annotations

import base64
import json
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import pytest
from celery import Celery
from kombu.utils.json import dumps

from busload.embedded import EmbeddedServer
from busload.workers.decode import decode


def sent(server: EmbeddedServer, item: Any, **options: Any) -> bytes:
    """Return the message that stock Celery stores."""
    app = Celery(broker=server.url, set_as_current=False)
    app.send_task("echo", (item,), {"tag": "x"}, queue="stored", **options)
    with server.client() as client:
        message: bytes = client.rpop("stored")
    return message


@pytest.mark.parametrize(
    "item",
    [
        *("text", "“ünicode” \U0001f68c", 1, 1.5, None, [1, [2.5, "x"]], {"a": {"b": []}}, 2**70),
        *(datetime(2026, 1, 2, tzinfo=UTC), UUID(int=7), b"bytes"),
    ],
)
def test_arguments_are_those_that_were_sent(server: EmbeddedServer, item: Any) -> None:
    headers, (args, kwargs, embedded) = decode(sent(server, item)) or pytest.fail("not read")
    assert (args, kwargs) == ([item], {"tag": "x"})
    assert type(args[0]) is type(item)
    assert headers.task == "echo"
    assert headers.argsrepr.startswith("(")
    assert not any(embedded.values())


def test_callbacks_travel_beside_the_arguments(server: EmbeddedServer) -> None:
    app = Celery(broker=server.url, set_as_current=False)
    callback = app.signature("done")
    _, (_, _, embedded) = decode(sent(server, "x", link=callback)) or pytest.fail("not read")
    assert embedded["callbacks"][0]["task"] == "done"


@pytest.mark.parametrize(
    "options", [{"countdown": 9}, {"compression": "gzip"}, {"serializer": "yaml"}, {"shadow": "y"}]
)
def test_what_is_unusual_is_left_to_celery(server: EmbeddedServer, options: dict[str, Any]) -> None:
    if options == {"serializer": "yaml"}:
        pytest.importorskip("yaml")
    assert decode(sent(server, "x", **options)) is None


def test_expiry_and_redelivery_are_seen(server: EmbeddedServer) -> None:
    headers, _ = decode(sent(server, "x", expires=30)) or pytest.fail("not read")
    assert headers.expires is not None
    message = json.loads(sent(server, "x"))
    message["headers"]["redelivered"] = True
    headers, _ = decode(json.dumps(message).encode()) or pytest.fail("not read")
    assert headers.redelivered is True


@pytest.mark.parametrize(
    "change",
    [
        {"body": 5},
        {"body": "no base64!"},
        {"headers": None},
        {"headers": {"task": "echo"}},
        {"headers": {"task": 5, "id": "x"}},
        {"properties": {}},
        {"content-type": "application/x-python-serialize"},
        {"body": base64.b64encode(b"[1, 2, 3]").decode()},
        {"body": base64.b64encode(b'[["x"], {}, "y"]').decode()},
        {"body": base64.b64encode(b'[["\\ud800"], {}, {}]').decode()},
        {"body": base64.b64encode(dumps([{"__type__": 1}, {}, {}]).encode()).decode()},
        {"body": base64.b64encode(b"[" * 100_000).decode()},
    ],
)
def test_damage_is_not_read(server: EmbeddedServer, change: dict[str, Any]) -> None:
    message = json.loads(sent(server, "x"))
    assert decode(json.dumps({**message, **change}).encode()) is None


@pytest.mark.parametrize("text", [b"", b"no json", b"[]", b"{}", b"null", b"\xff\xfe"])
def test_what_is_no_message_is_not_read(text: bytes) -> None:
    assert decode(text) is None
