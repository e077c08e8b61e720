from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from busload.bench.overhead import Results, Round, rows
from busload.bench.peers import BUSLOAD, SOLO, all_peers, default_celery_batches
from busload.cli import main


def test_every_peer_does_its_backlog() -> None:
    run = CliRunner().invoke(main, ["bench", "overhead", "--tasks", "70", "--rounds", "1", "--json"])
    assert run.exit_code == 0, run.output
    found = json.loads(run.stdout)
    peers = all_peers(default_celery_batches())
    assert [(row["peer"], row["events"]) for row in found] == [
        (peer.name, events) for events in (False, True) for peer in peers
    ]
    assert all(row["tasks_per_s"]["median"] > 0 for row in found)
    assert all(row["server_commands"]["median"] > 0 for row in found)


def test_a_peer_whose_environment_is_missing_is_refused() -> None:
    run = CliRunner().invoke(main, ["bench", "overhead", "--celery-batches", "nowhere/python"])
    assert run.exit_code == 2
    assert "nowhere/python" in run.output


def test_celery_batches_takes_part_when_its_environment_is_there() -> None:
    python = default_celery_batches()
    if python is None:
        pytest.skip("make bench sets up .venv-bench")
    assert [peer.name for peer in all_peers(python)].index("celery-batches 0.11") == 2


def test_rows_are_medians_and_ratios() -> None:
    def rounds(*costs: float) -> list[Round]:
        return [Round(tasks_per_s=1.0, worker_us=cost, server_us=1.0, server_commands=1.0) for cost in costs]

    results: Results = {(SOLO, False): rounds(300.0, 1000.0, 400.0), (BUSLOAD, False): rounds(90.0, 100.0, 110.0)}
    stock, ours = rows(results)
    assert (stock.worker_us.median, stock.worker_us.least, stock.worker_us.most) == (400.0, 300.0, 1000.0)
    assert stock.times_busload == pytest.approx(4.0)
    assert ours.times_busload == pytest.approx(1.0)
