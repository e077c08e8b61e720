"""API-10: every malformed or mistyped request gets a 4xx in the one error shape."""

import io
import json
from urllib.parse import quote

import pytest
from apiflask import APIFlask
from flask.testing import FlaskClient
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from pydantic import SecretStr
from werkzeug.test import TestResponse

from busload.api import Settings, create_app
from busload.api.request_body import MAX_DEPTH
from busload.embedded import EmbeddedServer

JSON = "application/json"


def post(api: FlaskClient, body: bytes, content_type: str | None = JSON) -> TestResponse:
    return api.post("/v1/tasks/anything", data=body, content_type=content_type)


def assert_error(answer: TestResponse, status: int, code: str, field: str | None = None) -> None:
    assert answer.status_code == status
    assert answer.content_type == JSON
    assert answer.json.keys() == {"error"}
    error = answer.json["error"]
    assert error["code"] == code
    assert error["message"]
    assert error.get("field") == field


def nested(depth: int) -> bytes:
    # The body's own object is the first level.
    return b'{"input":' + b"[" * (depth - 1) + b"]" * (depth - 1) + b"}"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b'"x"',
        b"null",
        b"5",
        b"true",
        b"{",
        b'{"input": 1} trailing',
        b"{'input': 1}",
        b'{"input": NaN}',
        b'{"input": Infinity}',
        b'{"input": -Infinity}',
        b'{"input": 1e999}',
        b'{"input": ' + b"9" * 5000 + b"}",
        b'{"input": "\xff"}',
        b'{"input": "\xed\xa0\x80"}',
        b'{"input": "\\ud800"}',
        b'{"input": "\\udc00 and more text"}',
        b'{"\\ud800": 1}',
        b'\xef\xbb\xbf{"input": 1}',
        '{"input": 1}'.encode("utf-16"),
        '{"input": 1}'.encode("utf-32"),
        nested(MAX_DEPTH + 1),
        nested(5000),
        b"[" * 500_000,
        b'{"input":' * 100_000,
    ],
    ids=lambda body: repr(body[:30]),
)
def test_what_is_no_json_object_is_400(api: FlaskClient, body: bytes) -> None:
    assert_error(post(api, body), 400, "invalid_json")


def test_the_deepest_body_allowed_passes(api: FlaskClient) -> None:
    assert post(api, nested(MAX_DEPTH)).status_code == 202


@pytest.mark.parametrize(
    "content_type",
    [None, "text/plain", "application/x-www-form-urlencoded", "application/json; charset=latin-1", "nonsense"],
)
def test_other_content_types_are_415(api: FlaskClient, content_type: str | None) -> None:
    assert_error(post(api, b'{"input": 1}', content_type), 415, "unsupported_media_type")


@pytest.mark.parametrize("content_type", ["application/json; charset=utf-8", "Application/JSON"])
def test_other_spellings_of_json_pass(api: FlaskClient, content_type: str) -> None:
    assert post(api, b'{"input": 1}', content_type).status_code == 202


@pytest.mark.parametrize(
    ("call", "field"),
    [
        ({}, "input"),
        ({"options": {}}, "input"),
        ({"input": 1, "extra": 2}, "extra"),
        ({"input": 1, "x" * 5000: 2}, "x" * 200),
        ({"input": 1, "options": None}, "options"),
        ({"input": 1, "options": []}, "options"),
        ({"input": 1, "options": "x"}, "options"),
    ],
)
def test_missing_extra_and_mistyped_fields_are_422(api: FlaskClient, call: dict[str, object], field: str) -> None:
    assert_error(api.post("/v1/tasks/anything", json=call), 422, "invalid_request", field)


@pytest.fixture
def narrow(server: EmbeddedServer, store: object) -> APIFlask:
    return create_app(Settings(broker_url=SecretStr(server.url), max_body_bytes=100))


def sized(length: int) -> bytes:
    return json.dumps({"input": ""}).encode().ljust(length)


def chunked(app: APIFlask, body: bytes) -> TestResponse:
    return app.test_client().post(
        "/v1/tasks/anything",
        input_stream=io.BytesIO(body),
        content_type=JSON,
        environ_overrides={"wsgi.input_terminated": True, "CONTENT_LENGTH": ""},
    )


@pytest.mark.parametrize("length", [101, 102, 10_000])
def test_too_large_bodies_are_413(narrow: APIFlask, length: int) -> None:
    assert_error(post(narrow.test_client(), sized(length)), 413, "too_large")
    # The surplus is blank: were it cut off, what is left would be valid.
    assert_error(chunked(narrow, sized(length)), 413, "too_large")


def test_the_largest_body_allowed_passes(narrow: APIFlask) -> None:
    assert post(narrow.test_client(), sized(100)).status_code == 202
    assert chunked(narrow, sized(100)).status_code == 202


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=200), st.sampled_from([JSON, None, "text/plain"]))
@example(b"\x00", JSON)
def test_no_bytes_make_a_server_error(api: FlaskClient, body: bytes, content_type: str | None) -> None:
    answer = post(api, body, content_type)
    assert 400 <= answer.status_code < 500
    assert answer.json["error"]["code"]


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.dictionaries(
        st.sampled_from(["input", "options", "x", ""]),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters()),
            lambda children: st.lists(children) | st.dictionaries(st.text(st.characters()), children),
            max_leaves=8,
        ),
    )
)
def test_no_json_makes_a_server_error(api: FlaskClient, call: dict[str, object]) -> None:
    for name in ("anything", "embed"):
        answer = api.post(f"/v1/tasks/{name}", data=json.dumps(call), content_type=JSON)
        assert answer.status_code in (202, 400, 422)
        assert answer.is_json


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.text())
def test_no_task_name_makes_a_server_error(api: FlaskClient, name: str) -> None:
    answer = api.post(f"/v1/tasks/{quote(name, safe='')}", json={"input": 1})
    assert answer.status_code in (202, 404)
    assert answer.is_json
