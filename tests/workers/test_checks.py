"""Settings that would lose work or break batches are refused at start, one clear line each."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import cast

import pytest
import redis

from busload.embedded import EmbeddedServer
from busload.workers.checks import server_refusal
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


class ClusterServer(EmbeddedServer):
    """A node of a Redis Cluster."""

    def _options(self) -> list[str]:
        return [*super()._options(), "--cluster-enabled", "yes"]


def test_a_redis_cluster_is_refused(tmp_path: Path) -> None:
    with ClusterServer(tcp=True) as server, worker_process(APP, tmp_path / "log", environment(server)) as worker:
        assert worker.process.wait(30) == os.EX_CONFIG
        assert "Redis Cluster is not supported" in worker.log


def test_an_old_redis_is_refused() -> None:
    class Old:
        def info(self) -> dict[str, object]:
            return {"redis_version": "6.2.14", "cluster_enabled": 0}

    class Forbidden:
        def info(self) -> dict[str, object]:
            raise redis.exceptions.NoPermissionError

    assert server_refusal(cast("redis.Redis", Old())) == "Redis 6.2.14 is too old to drain from; use Redis 7 or Valkey"
    assert server_refusal(cast("redis.Redis", Forbidden())) is None
