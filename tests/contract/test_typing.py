"""Type checkers infer what a batched task takes and gives, in an application of a user's."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

USER_CODE = """
from typing import Any

from busload import BatchTask, configure
from celery import Celery

app = configure(Celery("typed", broker="memory://"))


@app.task(base=BatchTask, name="embed", max_batch_size=64, max_wait_ms=50)
def embed(texts: list[str], /, *, normalize: bool = True) -> list[list[float]]:
    return [[0.0] for _ in texts]


@app.task(base=BatchTask, bind=True, per_item=("times",))
def measure(self: object, texts: list[str], /, *, times: Any = 1) -> list[int]:
    return [len(text) * count for text, count in zip(texts, times, strict=True)]


vector: list[float] = embed("a", normalize=False)
length: int = measure("a", times=3)
same: list[float] = embed.delay("a").get()
"""

MISTAKES = {
    "embed.delay(5)": "wrong item",
    'embed("a", speed=1)': "unknown option",
    'embed.delay("a", normalize="yes")': "wrong option",
    'wrong: str = embed("a")': "wrong result",
    "embed.delay()": "missing item",
}


def mypy(path: Path) -> str:
    command = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(path.parent / "cache"), str(path)]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout


def pyright(path: Path) -> str:
    command = [sys.executable, "-m", "basedpyright", "--level", "error", str(path)]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout


@pytest.mark.parametrize("checker", [mypy, pyright])
def test_right_calls_pass_and_wrong_ones_are_errors(checker: object, tmp_path: Path) -> None:
    assert callable(checker)
    path = tmp_path / "typed_app.py"
    path.write_text(USER_CODE + "\n".join(MISTAKES) + "\n")
    report = checker(path)
    first = USER_CODE.count("\n") + 1
    errors = {
        int(line.split(":")[1])
        for line in report.splitlines()
        if "error" in line and ":" in line and "typed_app" in line
    }
    assert errors == set(range(first, first + len(MISTAKES))), report
