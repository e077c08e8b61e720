from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from busload.bench.overhead import PEERS, Peer, Round, _rows
from busload.cli import main


def test_every_peer_does_its_backlog() -> None:
    run = CliRunner().invoke(main, ["bench", "overhead", "--tasks", "70", "--rounds", "1", "--json"])
    assert run.exit_code == 0, run.output
    rows = json.loads(run.stdout)
    assert [(row["peer"], row["events"]) for row in rows] == [
        (peer.name, events) for events in (False, True) for peer in PEERS
    ]
    assert all(row["tasks_per_s"] > 0 for row in rows)


def test_rows_are_medians_and_ratios() -> None:
    def rounds(*costs: float) -> list[Round]:
        return [Round(tasks_per_s=1.0, worker_us=cost, server_us=1.0) for cost in costs]

    results: dict[tuple[Peer, bool], list[Round]] = {
        (PEERS[0], False): rounds(300.0, 1000.0, 400.0),
        (PEERS[-1], False): rounds(90.0, 100.0, 110.0),
    }
    stock, ours = _rows(results)
    assert (stock.worker_us, stock.worker_us_spread) == (400.0, (300.0, 1000.0))
    assert stock.times_busload == pytest.approx(4.0)
    assert ours.times_busload == pytest.approx(1.0)
