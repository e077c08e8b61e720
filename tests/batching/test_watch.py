"""What looks at a queue tell of its oldest message and of the rate at which messages come."""

from __future__ import annotations

import pytest

from busload.batching import QueueWatch


def test_the_oldest_message_dates_from_the_look_that_first_saw_it() -> None:
    watch = QueueWatch()
    watch.see(depth=1, drained=0, now=10.0)
    watch.see(depth=5, drained=0, now=10.5)
    assert (watch.depth, watch.oldest_at) == (5, 10.0)


def test_after_others_have_drained_the_next_message_is_younger() -> None:
    watch = QueueWatch()
    watch.see(depth=4, drained=0, now=10.0)
    watch.see(depth=6, drained=0, now=11.0)
    watch.see(depth=3, drained=4, now=12.0)  # the four of the first look are gone, one more has come
    assert watch.oldest_at == 11.0
    watch.see(depth=1, drained=6, now=13.0)
    assert watch.oldest_at == 12.0


def test_a_queue_that_was_emptied_in_between_begins_anew() -> None:
    watch = QueueWatch()
    watch.see(depth=4, drained=0, now=10.0)
    watch.see(depth=0, drained=4, now=10.1)
    watch.see(depth=2, drained=4, now=20.0)
    assert watch.oldest_at == 20.0


def test_messages_that_went_back_are_not_taken_for_new_ones() -> None:
    watch = QueueWatch()
    watch.see(depth=4, drained=0, now=10.0)
    watch.see(depth=0, drained=4, now=11.0)
    watch.see(depth=4, drained=0, now=12.0)
    assert watch.oldest_at == 12.0


def test_a_stock_worker_that_takes_uncounted_does_not_age_what_is_left() -> None:
    watch = QueueWatch()
    watch.see(depth=4, drained=0, now=10.0)
    watch.see(depth=1, drained=0, now=11.0)
    assert watch.oldest_at == 11.0


@pytest.mark.parametrize(
    ("age_s", "came", "expected_s"),
    [
        (0.0, 0, 0.001),  # just seen: soon
        (0.016, 0, 0.016),  # nobody else came: no sooner than the wait has been long
        (0.010, 31, 0.010),  # full in 10 ms at this rate
        (0.010, 62, 0.001),  # nearly full
    ],
)
def test_looks_come_as_often_as_the_queue_fills(age_s: float, came: int, expected_s: float) -> None:
    watch = QueueWatch()
    watch.see(depth=1, drained=0, now=5.0)
    watch.see(depth=1 + came, drained=0, now=5.0 + age_s)
    assert watch.look_again_in_s(full=64, now=5.0 + age_s) == pytest.approx(expected_s, rel=0.1)
