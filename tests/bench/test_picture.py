from __future__ import annotations

from pathlib import Path

import pytest

from busload.bench.overhead import Row, Spread


def test_every_value_is_written_at_its_bar(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from matplotlib import rc_context

    from busload.bench.picture import draw

    one = Spread(1.0, 1.0, 1.0)
    rows = [
        Row(peer, events, one, Spread(cost, cost, cost), one, one, 1.0)
        for peer, events, cost in (
            ("stock", False, 1725.0),
            ("ours", False, 40.0),
            ("stock", True, 2485.0),
            ("ours", True, 45.0),
        )
    ]
    with rc_context({"svg.fonttype": "none"}):  # text stays text
        draw(rows, tmp_path / "overhead.svg")
    svg = (tmp_path / "overhead.svg").read_text()
    for text in ("stock", "ours", "1,725 µs", "2,485 µs", "40 µs", "45 µs", "events on"):
        assert text in svg
