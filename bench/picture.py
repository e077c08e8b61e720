"""The rows of ``busload bench overhead`` as a bar chart."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from .overhead import Row

_BAR = 0.38
_COLOURS = {False: "#1f77b4", True: "#ff9f40"}


def draw(rows: Sequence[Row], path: Path) -> None:
    """Write the worker's CPU time per task of every peer to ``path``; the suffix says in which format."""
    peers = list(dict.fromkeys(row.peer for row in rows))
    # White, so that it can be read on a dark page as well.
    figure = Figure(figsize=(8, 0.9 + 0.75 * len(peers)), layout="constrained", facecolor="white")
    axes = figure.add_subplot()
    for events in (False, True):
        medians = {row.peer: row.worker_us.median for row in rows if row.events == events}
        places = [place + (_BAR / 2 if events else -_BAR / 2) for place in range(len(peers))]
        bars = axes.barh(
            places,
            [medians[peer] for peer in peers],
            height=_BAR,
            color=_COLOURS[events],
            label=f"events {'on' if events else 'off'}",
        )
        axes.bar_label(bars, fmt="{:,.0f} µs", padding=4)
    axes.set_yticks(range(len(peers)), peers)
    axes.invert_yaxis()
    axes.set_title("Worker CPU time per task beside its own work (less is better)", loc="left", fontsize=11)
    axes.margins(x=0.12)
    axes.xaxis.set_visible(False)
    axes.spines[["top", "right", "bottom"]].set_visible(False)
    axes.legend(frameon=False, loc="lower right")
    figure.savefig(path)
