import logging

import pytest
from apiflask import APIFlask
from flask.testing import FlaskClient


def test_health_needs_nothing(api: FlaskClient) -> None:
    answer = api.get("/healthz")
    assert (answer.status_code, answer.json) == (200, {"status": "ok"})


@pytest.mark.parametrize("path", ["/", "/nope", "/v1/tasks/", "/v1/results/", "//healthz", "/healthz/", "/%ff"])
def test_unknown_paths_are_404_in_json(api: FlaskClient, path: str) -> None:
    answer = api.get(path)
    assert (answer.status_code, answer.content_type) == (404, "application/json")
    assert answer.json["error"]["code"] == "not_found"


def test_other_methods_are_405_and_say_which_are_allowed(api: FlaskClient) -> None:
    answer = api.put("/v1/tasks/embed")
    assert answer.status_code == 405
    assert answer.json["error"]["code"] == "method_not_allowed"
    assert set(answer.headers["Allow"].split(", ")) == {"OPTIONS", "POST"}


def test_an_unexpected_error_is_logged_and_not_shown(app: APIFlask, caplog: pytest.LogCaptureFixture) -> None:
    @app.get("/boom")
    def boom() -> None:
        raise RuntimeError("hunter2")

    with caplog.at_level(logging.ERROR):
        answer = app.test_client().get("/boom")
    assert (answer.status_code, answer.json["error"]["code"]) == (500, "internal_error")
    assert b"hunter2" not in answer.data
    assert "hunter2" in caplog.text
    assert "Traceback" in caplog.text
