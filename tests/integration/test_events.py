"""What Flower and other monitors see of calls that ride in batches."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from busload.embedded import EmbeddedServer, free_port
from tests.integration.conftest import APP, StartWorker
from tests.integration.worker_app import double
from tests.support import DEADLINE_S, ROOT, environment, until


@pytest.fixture
def flower(server: EmbeddedServer) -> Iterator[str]:
    """A real Flower on ``server``; its address."""
    port = free_port()
    process = subprocess.Popen(
        [sys.executable, "-m", "celery", "-A", APP, "flower", "--address=127.0.0.1", f"--port={port}"],
        env=environment(server, FLOWER_UNAUTHENTICATED_API="true"),
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        until(lambda: read(f"http://127.0.0.1:{port}/api/tasks") is not None)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(DEADLINE_S)


def read(url: str) -> Any:
    try:
        with urllib.request.urlopen(url, timeout=10) as response:
            return json.load(response)
    except urllib.error.URLError:
        return None


@pytest.mark.usefixtures("app")
def test_flower_lists_every_call_with_its_end(start_worker: StartWorker, flower: str) -> None:
    start_worker()
    good = [double.delay(number) for number in range(100)]
    bad = [double.delay(-1 - number) for number in range(5)]
    assert [result.get(timeout=DEADLINE_S) for result in good] == [number * 2 for number in range(100)]

    def states() -> Counter[str]:
        return Counter(task["state"] for task in read(f"{flower}/api/tasks?limit=1000").values())

    until(lambda: states() == {"SUCCESS": 100, "FAILURE": 5})
    tasks = read(f"{flower}/api/tasks?limit=1000")
    done = tasks[good[7].id]
    assert (done["name"], done["args"], done["result"], done["worker"]) == ("double", "(7,)", "14", "w1@test")
    assert done["received"] <= done["started"] <= done["succeeded"]
    assert done["runtime"] > 0
    failed = tasks[bad[2].id]
    assert failed["exception"] == "ValueError('-3 is negative')"
    assert "ValueError: -3 is negative" in failed["traceback"]
