import base64
import json
import re
from typing import Any

import pytest
import redis
from celery import Celery
from flask.testing import FlaskClient
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from busload.embedded import EmbeddedServer

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda children: st.lists(children, max_size=4) | st.dictionaries(st.text(), children, max_size=4),
    max_leaves=10,
)


def stored_messages(store: redis.Redis, queue: str) -> list[dict[str, Any]]:
    return [json.loads(message) for message in reversed(store.lrange(queue, 0, -1))]


def test_a_call_is_accepted_with_its_id_and_place(api: FlaskClient) -> None:
    answer = api.post("/v1/tasks/embed", json={"input": "a", "options": {"normalize": True}})
    task_id = answer.json["id"]
    assert answer.status_code == 202
    assert answer.json == {"id": task_id, "state": "PENDING", "href": f"/v1/results/{task_id}"}
    assert answer.headers["Location"] == f"/v1/results/{task_id}"


@pytest.mark.parametrize(
    ("name", "queue", "item", "options"),
    [
        ("embed", "gpu", "a", {}),
        ("embed", "gpu", "\u00fc\U0001f600" * 400, {"normalize": False, "dimensions": 8}),
        ("anything", "any", {"a": [1, 2.5, None, {"b": "c"}]}, {"x": [True]}),
        ("anything", "any", 12345678901234567890123, {}),
    ],
)
def test_the_message_is_the_one_that_stock_celery_sends(
    api: FlaskClient,
    store: redis.Redis,
    server: EmbeddedServer,
    name: str,
    queue: str,
    item: object,
    options: dict[str, object],
) -> None:
    # Encoded here, as Flask's test client would sort the options.
    body = json.dumps({"input": item, "options": options})
    task_id = api.post(f"/v1/tasks/{name}", data=body, content_type="application/json").json["id"]
    stock = Celery(broker=server.url, set_as_current=False)
    stock.send_task(name, args=[item], kwargs=options, task_id=task_id, queue=queue, retry=False)
    ours, theirs = stored_messages(store, queue)
    for message in (ours, theirs):
        # Of each message, and of each application that sends.
        del message["properties"]["delivery_tag"]
        del message["properties"]["reply_to"]
    assert ours == theirs


def test_submitting_subscribes_to_nothing_and_takes_two_connections(
    api: FlaskClient, store: redis.Redis, server: EmbeddedServer
) -> None:
    before = {client["id"] for client in store.client_list()}
    ids = [api.post("/v1/tasks/embed", json={"input": "a"}).json["id"] for _ in range(100)]
    clients = [client for client in store.client_list() if client["id"] not in before]
    # The backend's, kombu's channel, and the one on which kombu first looks whether the broker answers.
    assert len(clients) <= 3
    assert all(client["sub"] == client["psub"] == "0" for client in clients)
    assert store.pubsub_channels() == []
    channels = [f"celery-task-meta-{task_id}" for task_id in ids]
    assert {subscribers for _, subscribers in store.pubsub_numsub(*channels)} == {0}


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(json_values)
def test_items_arrive_as_sent(api: FlaskClient, store: redis.Redis, item: object) -> None:
    store.delete("any")
    assert api.post("/v1/tasks/anything", json={"input": item}).status_code == 202
    [message] = stored_messages(store, "any")
    args, _, _ = json.loads(base64.b64decode(message["body"]))
    assert args == [item]


def test_unknown_task(api: FlaskClient) -> None:
    answer = api.post("/v1/tasks/nope", json={"input": "a"})
    assert (answer.status_code, answer.json["error"]["code"]) == (404, "unknown_task")


@pytest.mark.parametrize(
    ("call", "code", "field"),
    [
        ({"input": 5}, "invalid_input", "input"),
        ({"input": "x" * 1001}, "invalid_input", "input"),
        ({"input": "a", "options": {"normalize": "secret"}}, "invalid_options", "options.normalize"),
        ({"input": "a", "options": {"dimensions": 0}}, "invalid_options", "options.dimensions"),
        ({"input": "a", "options": {"unknown": 1}}, "invalid_options", "options.unknown"),
    ],
)
def test_what_the_task_does_not_take_is_refused(
    api: FlaskClient, store: redis.Redis, call: dict[str, object], code: str, field: str
) -> None:
    answer = api.post("/v1/tasks/embed", json=call)
    assert answer.status_code == 422
    assert (answer.json["error"]["code"], answer.json["error"]["field"]) == (code, field)
    assert store.llen("gpu") == 0


def test_the_message_is_bounded_and_does_not_show_the_input(api: FlaskClient) -> None:
    for call in ({"input": ["hunter2"] * 5000}, {"input": "a", "options": {"normalize": "hunter2" * 5000}}):
        answer = api.post("/v1/tasks/embed", json=call)
        assert answer.status_code == 422
        assert len(answer.data) < 500
        assert b"hunter2" not in answer.data


@pytest.mark.parametrize("reserved", [{"__type__": "uuid", "__value__": {}}, {"__type__": "x", "__value__": 1}])
def test_objects_that_kombu_would_read_as_other_types_are_refused(api: FlaskClient, reserved: object) -> None:
    answer = api.post("/v1/tasks/anything", json={"input": {"a": [0, reserved]}})
    assert answer.status_code == 422
    assert (answer.json["error"]["code"], answer.json["error"]["field"]) == ("invalid_input", "input.a[1]")
    answer = api.post("/v1/tasks/anything", json={"input": 0, "options": {"x": reserved}})
    assert (answer.json["error"]["code"], answer.json["error"]["field"]) == ("invalid_options", "options.x")


def test_ids_differ_between_calls(api: FlaskClient) -> None:
    ids = {api.post("/v1/tasks/embed", json={"input": "a"}).json["id"] for _ in range(50)}
    assert len(ids) == 50
    assert all(re.fullmatch(r"[0-9a-f-]{36}", task_id) for task_id in ids)
