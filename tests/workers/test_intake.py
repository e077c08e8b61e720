"""The waiting room between the consumer's thread and the preparing thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, cast

import pytest

from busload.batching import Batch, StaticPolicy
from busload.workers.intake import Intake
from busload.workers.request import Call, Partition

SIZE = 4
A, B = Partition.of("a", {}), Partition.of("b", {})


def call(name: str) -> Call:
    return cast("Call", name)


@pytest.fixture
def intake() -> Iterator[Intake]:
    intake = Intake(lambda partition: StaticPolicy(SIZE, max_wait_ms=0.0 if partition == B else 60_000.0))
    yield intake
    intake.close()


@pytest.fixture
def taker() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as executor:
        yield executor


def take(intake: Intake, taker: ThreadPoolExecutor) -> Future[Batch[Partition, Any] | None]:
    """Wait for the next batch on another thread, which is waiting when this returns."""
    waits = threading.Event()
    changed = intake._changed
    wait = changed.wait

    def tell_and_wait(timeout: float | None = None) -> bool:
        waits.set()
        return wait(timeout)

    changed.wait = tell_and_wait  # type: ignore[method-assign]
    future = taker.submit(intake.take)
    waits.wait(10)
    return future


def test_the_call_that_fills_a_batch_wakes_the_taker(intake: Intake, taker: ThreadPoolExecutor) -> None:
    batch = take(intake, taker)
    for number in range(SIZE):
        intake.offer(A, call(f"{number}"))
    assert batch.result(10) == Batch(A, ["0", "1", "2", "3"])


def test_a_call_that_is_due_at_once_wakes_a_taker_that_waits_for_another(
    intake: Intake, taker: ThreadPoolExecutor
) -> None:
    intake.offer(A, call("waits a minute"))
    batch = take(intake, taker)
    intake.offer(B, call("now"))
    assert batch.result(10) == Batch(B, ["now"])


def test_a_full_batch_is_taken_ahead_of_a_busy_runner_but_not_two(intake: Intake, taker: ThreadPoolExecutor) -> None:
    for number in range(3 * SIZE):
        intake.offer(A, call(f"{number}"))
    assert intake.take() is not None
    assert intake.take() is not None
    third = take(intake, taker)
    assert not third.done()
    intake.batch_done()
    assert third.result(10) == Batch(A, ["8", "9", "10", "11"])


def test_an_incomplete_batch_waits_for_the_runner_and_leaves_when_it_is_free(
    intake: Intake, taker: ThreadPoolExecutor
) -> None:
    intake.offer(B, call("first"))
    assert intake.take() == Batch(B, ["first"])
    intake.offer(B, call("second"))
    second = take(intake, taker)
    assert not second.done()
    intake.batch_done()
    assert second.result(10) == Batch(B, ["second"])


def test_closing_wakes_the_taker_and_returns_what_waits(intake: Intake, taker: ThreadPoolExecutor) -> None:
    batch = take(intake, taker)
    intake.offer(A, call("left"))
    assert intake.close() == ["left"]
    assert batch.result(10) is None
    assert len(intake) == 0


def test_a_new_set_of_options_is_told_with_the_others_of_its_task(intake: Intake) -> None:
    other = Partition.of("a", {"x": 1})
    assert intake.offer(A, call("1")) == [A]
    assert intake.offer(A, call("2")) == []
    assert intake.offer(B, call("3")) == [B]
    assert intake.offer(other, call("4")) == [A, other]
