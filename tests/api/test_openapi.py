import json
import re
from typing import Any

import pytest
from flask.testing import FlaskClient
from jsonschema import Draft202012Validator


@pytest.fixture
def document(api: FlaskClient) -> dict[str, Any]:
    document = api.get("/openapi.json", headers={"Host": "evil.example"}).json
    assert isinstance(document, dict)
    return document


def test_it_describes_every_route(document: dict[str, Any]) -> None:
    assert document["openapi"].startswith("3.1")
    operations = {(method, path) for path, methods in document["paths"].items() for method in methods}
    assert operations == {
        ("get", "/healthz"),
        ("post", "/v1/tasks/{name}"),
        ("get", "/v1/results/{task_id}"),
    }


def test_all_references_lead_somewhere(document: dict[str, Any]) -> None:
    for name in re.findall(r'"#/components/schemas/([^"]+)"', json.dumps(document)):
        Draft202012Validator.check_schema(document["components"]["schemas"][name])


def test_it_does_not_depend_on_who_asks(document: dict[str, Any]) -> None:
    assert "evil.example" not in json.dumps(document)


def test_bodies_are_as_described(api: FlaskClient, document: dict[str, Any]) -> None:
    assert document["paths"]["/v1/tasks/{name}"]["post"]["requestBody"]["required"] is True

    def fits(body: object, path: str, method: str, status: str) -> bool:
        schema = document["paths"][path][method]["responses"][status]["content"]["application/json"]["schema"]
        return Draft202012Validator({**document, **schema}).is_valid(body)

    accepted = api.post("/v1/tasks/embed", json={"input": "a"}).json
    assert fits(accepted, "/v1/tasks/{name}", "post", "202")
    assert fits(api.get(accepted["href"]).json, "/v1/results/{task_id}", "get", "200")
    assert fits(api.get("/v1/results/nope").json, "/v1/results/{task_id}", "get", "404")
    assert fits(api.post("/v1/tasks/embed", json={}).json, "/v1/tasks/{name}", "post", "422")
    assert not fits({"detail": "x"}, "/v1/tasks/{name}", "post", "422")


def test_there_is_a_page_to_read_it(api: FlaskClient) -> None:
    answer = api.get("/docs")
    assert (answer.status_code, answer.mimetype) == (200, "text/html")
