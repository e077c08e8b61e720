"""The helpers for users' tests, used as users would."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from celery import Celery

from busload import BatchTask, ResultCountError, configure
from busload.testing import RecordedTask, run_batch

app = configure(Celery("under_test", broker="redis://nowhere.invalid/0", backend="redis://nowhere.invalid/0"))

ran: list[int] = []


@app.task(base=BatchTask, name="under_test.repeat", per_item=("times",), max_wait_ms=200)
def repeat(words: list[str], /, *, times: list[int] = 1, end: str = "") -> list[Any]:  # type: ignore[assignment]
    ran.append(len(words))
    return [word * count + end if count else ValueError("no times") for word, count in zip(words, times, strict=True)]


@app.task(base=BatchTask, name="under_test.short")
def short(words: list[str], /) -> list[str]:
    return words[1:]


def test_run_batch_gives_one_value_or_error_per_item() -> None:
    values = run_batch(repeat, ["a", "b", "c"], times=[1, 0, 2], end="!")
    assert [values[0], str(values[1]), values[2]] == ["a!", "no times", "cc!"]
    assert run_batch(repeat, ["a", "b"]) == ["a", "b"]


def test_run_batch_checks_as_the_worker_would() -> None:
    with pytest.raises(ResultCountError):
        run_batch(short, ["a", "b"])
    with pytest.raises(TypeError, match="Expected `str`, got `int`"):
        run_batch(repeat, ["a", 5])
    with pytest.raises(TypeError, match="unknown field"):
        run_batch(repeat, ["a"], speed=1)


def test_a_worker_in_memory_forms_batches(busload_worker: Callable[[Celery], Any]) -> None:
    ran.clear()
    busload_worker(app)
    results = [repeat.delay("a", times=number) for number in (1, 2, 3, 0)]
    assert [result.get(timeout=30) for result in results[:3]] == ["a", "aa", "aaa"]
    with pytest.raises(ValueError, match="no times"):
        results[3].get(timeout=30)
    assert ran == [4]


def test_the_applications_own_settings_come_back() -> None:
    assert app.conf.broker_url == "redis://nowhere.invalid/0"
    assert app.conf.result_backend == "redis://nowhere.invalid/0"


def test_a_recorded_task_stands_in_for_one_that_is_only_sent_to() -> None:
    embed = RecordedTask({"a": [1.0], "bad": ValueError("bad text")})
    assert embed.delay("a", normalize=False).get() == [1.0]
    failed = embed.delay("bad")
    assert (failed.state, failed.ready()) == ("FAILURE", True)
    with pytest.raises(ValueError, match="bad text"):
        failed.get()
    assert embed.calls == [("a", {"normalize": False}), ("bad", {})]
