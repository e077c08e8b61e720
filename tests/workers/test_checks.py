"""Settings that would lose work or break batches are refused at start, one clear line each."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from busload.embedded import EmbeddedServer
from tests.support import ROOT, environment, worker_process

APP = "tests.integration.worker_app"


def refused(server: EmbeddedServer, *options: str, **settings: object) -> list[str]:
    """Start a worker that must not start, and return the lines that say why."""
    run = subprocess.run(
        [sys.executable, "-m", "celery", "-A", APP, "worker", *options],
        # Without C_FORCE_ROOT Celery itself refuses pickle to root, before our turn.
        env=environment(server, WORKER_APP_SETTINGS=json.dumps(settings), C_FORCE_ROOT="1"),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert run.returncode == os.EX_CONFIG, run.stderr
    assert "Traceback" not in run.stderr
    return [line for line in run.stderr.splitlines() if line.startswith("busload: ")]


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedServer]:
    with EmbeddedServer() as server:
        yield server


THREADS = ("-P", "threads", "-c", "1")


@pytest.mark.parametrize(
    ("options", "settings", "line"),
    [
        (("-P", "prefork"), {}, "the prefork pool cannot share one model; start the worker with -P threads -c 1"),
        (("-P", "solo"), {}, "the solo pool cannot share one model; start the worker with -P threads -c 1"),
        (("-P", "threads", "-c", "4"), {}, "concurrency 4 would let other tasks crowd the model; start it with -c 1"),
        (
            (*THREADS, "--autoscale", "4,1"),
            {},
            "autoscale has nothing to scale: one process runs one batch at a time; start more workers instead",
        ),
        (
            THREADS,
            {"worker_prefetch_multiplier": 8},
            "worker_prefetch_multiplier=8 caps batches at 8 of 64 items; leave it unset, or set at least 64",
        ),
        (
            THREADS,
            {"worker_prefetch_multiplier": 0},
            "worker_prefetch_multiplier=0 would let this worker hoard every message; leave it unset, "
            "or set at least 64",
        ),
        (
            THREADS,
            {"worker_disable_prefetch": True},
            "worker_disable_prefetch=True caps batches at one item; leave it unset",
        ),
        (
            THREADS,
            {"accept_content": ["json", "pickle"]},
            "accept_content allows pickle, which runs code from data; allow json or msgpack alone",
        ),
    ],
)
def test_a_dangerous_setting_is_refused(
    server: EmbeddedServer, options: tuple[str, ...], settings: dict[str, object], line: str
) -> None:
    assert refused(server, *options, **settings) == [f"busload: {line}"]


def test_every_dangerous_setting_has_its_line(server: EmbeddedServer) -> None:
    lines = refused(server, "-P", "prefork", worker_prefetch_multiplier=1, worker_disable_prefetch=True)
    assert len(lines) == 3


def test_a_worker_of_other_queues_keeps_its_own_pool(server: EmbeddedServer, tmp_path: Path) -> None:
    with worker_process(
        APP, tmp_path / "log", environment(server), "-Q", "elsewhere", pool=("-P", "prefork", "-c", "1")
    ) as worker:
        worker.wait_until_ready()
        assert worker.stop() == 0
