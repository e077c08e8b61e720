"""The waiting room between the consumer's thread and the preparing thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, cast

import pytest

from busload.batching import NEVER, NOW, Batch, StaticPolicy
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


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def fill(intake: Intake, count: int, at: float = 0.0) -> None:
    intake.offer_all([(A, call(f"call {number}")) for number in range(count)], at)


def test_calls_are_welcome_while_the_runner_has_nothing_to_do() -> None:
    intake = Intake(lambda _: StaticPolicy(2, 50.0))
    appetite = intake.appetite()
    assert appetite.runner_free
    assert appetite.from_at == NOW


def test_nothing_is_fetched_ahead_before_a_batch_has_been_measured() -> None:
    clock = Clock()
    intake = Intake(lambda _: StaticPolicy(2, 50.0), clock)
    fill(intake, 2)
    assert intake.take() is not None
    intake.batch_began("task")
    assert intake.appetite().from_at == NEVER


def test_the_next_batch_is_welcome_shortly_before_the_running_one_ends() -> None:
    clock = Clock()
    intake = Intake(lambda _: StaticPolicy(2, 50.0), clock)
    for _ in range(2):
        fill(intake, 2)
        assert intake.take() is not None
        intake.batch_began("task")
        began_at = clock.now
        clock.now += 1.0
        if began_at == 0.0:
            intake.batch_done()
    appetite = intake.appetite()
    assert began_at + 0.9 < appetite.from_at < began_at + 1.0 < appetite.until_at
    fill(intake, 2)  # and once it is here, no more
    assert intake.appetite().from_at == NEVER


def test_part_of_a_batch_does_not_leave_while_it_is_being_gathered() -> None:
    clock = Clock()
    intake = Intake(lambda _: StaticPolicy(4, 50.0), clock)
    taken: list[object] = []
    with intake.gathering():
        fill(intake, 1)
        clock.now = 1.0
        thread = threading.Thread(target=lambda: taken.append(intake.take()))
        thread.start()
        time.sleep(0.05)
        assert taken == []
        fill(intake, 1)
    thread.join(10)
    (batch,) = taken
    assert len(batch.items) == 2  # type: ignore[attr-defined]
