"""``busload bench``: the commands, and their results as tables or JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.table import Table

from ..batching import BusloadError

if TYPE_CHECKING:
    from . import overhead as overhead_bench
    from . import rate as rate_bench

# Where nobody's terminal says how wide a table may be.
_PIPE_WIDTH = 120


@click.group()
def bench() -> None:
    """Measure what busload costs, beside its peers and under load."""


@bench.command()
@click.option(
    "--tasks",
    default=2000,
    show_default=True,
    help="Tasks in the backlog of the slow peers; busload gets 5 and 10 times as many. Few give coarse figures.",
)
@click.option("--rounds", default=3, show_default=True, help="How often each peer takes its turn.")
@click.option(
    "--celery-batches",
    "celery_batches_python",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="Python of the environment that has celery-batches.  [default: .venv-bench/bin/python of the checkout]",
)
@click.option(
    "--picture",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Draw the workers' CPU time to this file, .svg or .png; needs busload[bench].",
)
@click.option("--json", "as_json", is_flag=True, help="Print the rows as JSON.")
def overhead(tasks: int, rounds: int, celery_batches_python: Path | None, picture: Path | None, as_json: bool) -> None:
    """CPU time of worker and Redis per task, beside stock Celery and celery-batches."""
    from .overhead import measure
    from .peers import all_peers, default_celery_batches

    console = _console(as_json)
    if picture is not None:
        try:
            from .picture import draw
        except ModuleNotFoundError as error:
            raise click.ClickException("--picture needs matplotlib: pip install 'busload[bench]'") from error
    python = celery_batches_python or default_celery_batches()
    if python is None:
        console.print("  celery-batches is left out: run make bench, or give --celery-batches a Python that has it")
    try:
        rows = measure(lambda line: console.print(f"  {line}"), all_peers(python), tasks, rounds)
    except BusloadError as error:
        raise click.ClickException(str(error)) from error
    if picture is not None:
        draw(rows, picture)
    if as_json:
        click.echo(json.dumps([row.as_dict() for row in rows]))
    else:
        console.print(_overhead_table(rows, f"CPU per task, median of {rounds} rounds"))


@bench.command()
@click.option("--rates", default="100,1000,5000,10000", show_default=True, help="Tasks a second, one run for each.")
@click.option("--seconds", default=20.0, show_default=True, help="How long each rate is kept up.")
@click.option("--backlog", default=20_000, show_default=True, help="Tasks of one more run, all queued beforehand.")
@click.option("--events", is_flag=True, help="Let the worker send task events, as Flower needs them.")
@click.option("--receive", type=click.Choice(["drain", "stock"]), default="drain", show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print the rows as JSON.")
def rate(rates: str, seconds: float, backlog: int, events: bool, receive: str, as_json: bool) -> None:
    """Latency, batches and idle time at given rates, with a model that takes 5 ms for a batch.

    Fails when a task is left without its result.
    """
    from .rate import Load, measure

    try:
        loads = [Load(round(float(rate) * seconds), float(rate)) for rate in rates.split(",") if rate]
    except ValueError as error:
        raise click.BadParameter(f"{rates}: numbers with commas between them", param_hint="--rates") from error
    if backlog:
        loads.append(Load(backlog))
    console = _console(as_json)
    try:
        rows = list(measure(lambda line: console.print(f"  {line}"), loads, receive, events=events))
    except BusloadError as error:
        raise click.ClickException(str(error)) from error
    if as_json:
        click.echo(json.dumps([row.as_dict() for row in rows]))
    else:
        console.print(_latency_table(rows), _model_table(rows))
    if incomplete := [row.load for row in rows if not row.is_complete]:
        raise click.ClickException(f"tasks were left without their results at {', '.join(incomplete)}")


def _console(as_json: bool) -> Console:
    console = Console(stderr=as_json, highlight=False)
    if not console.is_terminal:
        console.width = _PIPE_WIDTH
    return console


def _overhead_table(rows: Sequence[overhead_bench.Row], title: str) -> Table:
    table = _table(
        title, "peer", "events", "tasks/s", "worker µs", "least - most", "Redis µs", "least - most",
        "Redis commands", "times busload",
    )  # fmt: skip
    for row in rows:
        table.add_row(
            row.peer,
            "on" if row.events else "off",
            f"{row.tasks_per_s.median:.0f}",
            f"{row.worker_us.median:.0f}",
            f"{row.worker_us.least:.0f} - {row.worker_us.most:.0f}",
            f"{row.server_us.median:.1f}",
            f"{row.server_us.least:.1f} - {row.server_us.most:.1f}",
            f"{row.server_commands.median:.1f}",
            f"{row.times_busload:.1f}",
        )
    return table


def _latency_table(rows: Sequence[rate_bench.Row]) -> Table:
    table = _table("Calls", "load", "tasks/s", "p50 ms", "p99 ms", "p99.9 ms", "left on the queue", "unanswered")
    for row in rows:
        table.add_row(
            row.load,
            f"{row.achieved_per_s:.0f}",
            *("" if ms is None else f"{ms:.0f}" for ms in (row.p50_ms, row.p99_ms, row.p999_ms)),
            str(row.left_on_queue),
            str(row.unanswered),
        )
    return table


def _model_table(rows: Sequence[rate_bench.Row]) -> Table:
    table = _table(
        "The worker, whose model takes 5 ms for a batch", "load", "mean batch", "gap ms", "in the model", "worker CPU",
        "Redis CPU", "worker MiB",
    )  # fmt: skip
    for row in rows:
        before_mib, after_mib = row.worker_mib
        table.add_row(
            row.load,
            f"{row.model.mean_batch:.1f}",
            f"{row.model.gap_ms:.2f}",
            f"{row.model.busy:.0%}",
            f"{row.worker_cpu:.0%}",
            f"{row.server_cpu:.0%}",
            f"{before_mib:.0f} to {after_mib:.0f}",
        )
    return table


def _table(title: str, name: str, *columns: str) -> Table:
    table = Table(title=title)
    table.add_column(name)
    for column in columns:
        table.add_column(column, justify="right")
    return table
