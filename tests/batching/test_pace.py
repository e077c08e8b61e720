"""When the batch after the running one is fetched."""

from __future__ import annotations

import pytest

from busload.batching import Pace


def test_nothing_is_fetched_ahead_of_a_batch_of_which_nothing_is_known() -> None:
    pace = Pace()
    pace.ran("embed", 1.0)
    assert pace.fetch_window("generate", began_at=0.0) is None


def test_the_next_batch_is_fetched_shortly_before_the_end() -> None:
    pace = Pace()
    pace.ran("embed", 1.0)
    pace.stepped("fetch", 0.004)
    pace.stepped("prepare", 0.006)
    opens_at, closes_at = pace.fetch_window("embed", began_at=10.0) or (0.0, 0.0)
    assert opens_at == pytest.approx(11.0 - 2 * 0.010 - 0.003)
    assert closes_at == pytest.approx(12.0)


def test_a_short_batch_has_its_next_one_fetched_at_once() -> None:
    pace = Pace()
    pace.ran("embed", 0.005)
    pace.stepped("fetch", 0.003)
    opens_at, closes_at = pace.fetch_window("embed", began_at=10.0) or (0.0, 0.0)
    assert opens_at < 10.0 < closes_at


def test_newer_runs_weigh_more() -> None:
    pace = Pace()
    for _ in range(20):
        pace.ran("embed", 1.0)
    for _ in range(20):
        pace.ran("embed", 3.0)
    opens_at, _ = pace.fetch_window("embed", began_at=0.0) or (0.0, 0.0)
    assert 2.9 < opens_at < 3.0
