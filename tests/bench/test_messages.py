"""Messages made from a template are those that ``send_task`` would have sent."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from celery import Celery

from busload.bench.messages import Answers, Messages, Template
from busload.embedded import EmbeddedServer

QUEUE = "queue"


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedServer]:
    with EmbeddedServer() as server:
        yield server


@pytest.fixture
def messages(server: EmbeddedServer) -> Messages:
    return Messages.new(Template.of(server, "echo", QUEUE))


def test_a_message_is_what_send_task_makes(server: EmbeddedServer, messages: Messages) -> None:
    with Celery(broker=server.url, set_as_current=False) as app, server.client() as client:
        app.send_task("echo", (messages.item(3),), task_id=messages.task_id(3), queue=QUEUE)
        sent = json.loads(client.rpop(QUEUE))
    made = json.loads(messages.message(3))
    for message in (sent, made):  # those are another client's
        del message["properties"]["reply_to"], message["properties"]["delivery_tag"], message["headers"]["origin"]
    assert made == sent


def test_ids_and_tags_are_unique(messages: Messages) -> None:
    made = [json.loads(messages.message(number)) for number in range(20)]
    assert len({message["headers"]["id"] for message in made}) == 20
    assert len({message["properties"]["delivery_tag"] for message in made}) == 20


def test_answers_that_are_missing_failed_or_another_s_are_wrong(server: EmbeddedServer, messages: Messages) -> None:
    stored = {0: ("SUCCESS", "item 0"), 1: ("SUCCESS", "item 0"), 2: ("FAILURE", "item 2")}
    with server.client() as client:
        for number, (status, result) in stored.items():
            key = f"celery-task-meta-{messages.task_id(number)}"
            client.set(key, json.dumps({"status": status, "result": result}), ex=3600)
        assert Answers(client, messages, 1).wrong(patience_s=0) == 0
        assert Answers(client, messages, 4).wrong(patience_s=0) == 3
        assert not Answers(client, messages, 4).has_last()
        assert [number for number, _ in Answers(client, messages, 4).stored_at(3600)] == [0, 1, 2]
