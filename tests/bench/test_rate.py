from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from busload.bench.rate import Run, percentile, summarize
from busload.cli import main


def test_every_task_is_answered_at_a_rate_and_from_a_backlog() -> None:
    options = ["--rates", "200", "--seconds", "1", "--backlog", "300", "--json"]
    run = CliRunner().invoke(main, ["bench", "rate", *options])
    assert run.exit_code == 0, run.output
    at_rate, backlog = json.loads(run.stdout)
    assert (at_rate["load"], at_rate["tasks"]) == ("200/s", 200)
    assert (backlog["load"], backlog["tasks"]) == ("backlog of 300", 300)
    assert 0 < at_rate["p50_ms"] <= at_rate["p99_ms"] <= at_rate["p999_ms"]
    assert backlog["p50_ms"] is None
    for row in (at_rate, backlog):
        assert (row["left_on_queue"], row["unanswered"]) == (0, 0)
        assert 1 <= row["model"]["mean_batch"] <= 64
        assert 0 < row["model"]["busy"] < 1


def test_rates_must_be_numbers() -> None:
    run = CliRunner().invoke(main, ["bench", "rate", "--rates", "100,fast"])
    assert run.exit_code == 2
    assert "100,fast" in run.output


def test_the_gap_is_between_the_runs_of_the_model() -> None:
    model = summarize([Run(10.0, 11.0, 4), Run(11.5, 12.0, 6), Run(12.1, 14.0, 8)])
    assert model.mean_batch == pytest.approx(6.0)
    assert model.gap_ms == pytest.approx(300.0)
    assert model.busy == pytest.approx(3.4 / 4.0)


def test_a_percentile_is_one_of_the_values() -> None:
    values = [float(value) for value in range(1000)]
    assert [percentile(values, share) for share in (0.5, 0.99, 0.999)] == [500.0, 990.0, 999.0]
    assert percentile([7.0], 0.999) == 7.0
