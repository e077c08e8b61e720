"""The ``busload`` command. Each subcommand imports what it needs, so that a small install still has the others."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from types import FrameType

import click
from rich.console import Console
from rich.table import Table

from . import __version__
from .batching import BusloadError
from .bench.cli import bench
from .worker_cli import worker


@click.group()
@click.version_option(__version__, prog_name="busload")
def main() -> None:
    """Celery tasks that ride the GPU together."""


@main.command()
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def demo(as_json: bool) -> None:
    """Run the main job once and check every result."""
    from .demo import Report, run_demo

    console = Console(stderr=as_json, highlight=False)

    def show(report: Report) -> None:
        table = Table(title="busload demo", show_header=False)
        for name, value in (
            ("texts", f"{report.texts} ({report.by_rest} by REST, {report.by_delay} by delay())"),
            ("batches", f"{report.batches}, {report.mean_fill:.1f} texts each on average"),
            ("latency", f"p50 {report.p50_ms:.0f} ms, p99 {report.p99_ms:.0f} ms with everything sent at once"),
            ("batched", f"{report.batched_per_s:.0f} texts/s"),
            ("one at a time", f"{report.alone_per_s:.0f} texts/s"),
            ("checked", f"all {report.texts} against the text alone; least cosine {report.least_cosine:.6f}"),
            ("Flower", f"shows {report.seen_in_flower} of {report.texts} as done"),
            ("killed", f"one of two workers by kill -9 while it held {report.held_by_killed} texts; 0 lost"),
        ):
            table.add_row(name, value)
        console.print(table)
        console.print(f"\nNearest to “{report.query}”")
        for cosine, text in report.nearest:
            console.print(f"  {cosine:.2f}  {text}", soft_wrap=True)

    try:
        report = run_demo(lambda line: console.print(f"  {line}"))
    except BusloadError as error:
        raise click.ClickException(str(error)) from error
    if as_json:
        click.echo(json.dumps(report.as_dict()))
    else:
        show(report)


@main.command(name="up")
@click.option("--data-dir", type=click.Path(path_type=Path, file_okay=False), help="Keep the server's data here.")
@click.option("--api-port", default=8000, show_default=True, help="0 takes a free port.")
@click.option("--flower-port", default=5555, show_default=True, help="0 takes a free port.")
@click.option("-A", "--app", "app_module", default="busload.app", show_default=True, help="The Celery application.")
def run_up(data_dir: Path | None, api_port: int, flower_port: int, app_module: str) -> None:
    """Run server, worker, API and Flower on this machine until Ctrl-C."""
    from .stack import running_stack

    console = Console(highlight=False)
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        with running_stack(
            app_module, lambda line: console.print(f"  {line}"), data_dir, api_port, flower_port
        ) as stack:
            console.print("Everything is up. Ctrl-C ends it.")
            death = stack.wait()
            raise click.ClickException(str(death))
    except BusloadError as error:
        raise click.ClickException(str(error)) from error
    except KeyboardInterrupt:
        console.print("Stopped.")


@main.command()
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", default=8000, show_default=True, help="Port to listen on.")
@click.option("--workers", default=1, show_default=True, help="Processes.")
def api(host: str, port: int, workers: int) -> None:
    """Serve the REST API. BUSLOAD_BROKER_URL and BUSLOAD_RESULT_BACKEND say where Redis is."""
    import os

    from .api.server import serve
    from .api.settings import Settings

    try:
        settings = Settings.from_env(os.environ)
    except ValueError as error:
        raise click.ClickException(str(error)) from error
    try:
        serve(settings, host, port, workers)
    except OSError as error:
        raise click.ClickException(f"cannot listen on {host}:{port}: {error.strerror}") from error


main.add_command(bench)
main.add_command(worker)


def _interrupt(signum: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
