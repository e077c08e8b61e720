"""``busload worker``: worker processes of a Celery application, kept running; and the way out of busload."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from celery import Celery

    from .eject import LeasesAlive

LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
# As Celery's, whose workers write beside us.
LOG_FORMAT = "[%(asctime)s: %(levelname)s/busload worker] %(message)s"
STOP_MARGIN_S = 5.0
"""Beyond the grace of a running batch, to store its results and hand the rest back."""


def _listed(context: click.Context, parameter: click.Parameter, value: str | None) -> list[str]:
    names = [name.strip() for name in value.split(",")] if value is not None else []
    if "" in names or len(set(names)) < len(names):
        raise click.BadParameter(f"{value!r} is no list of different names with commas between")
    return names


@click.group(invoke_without_command=True)
@click.option("-A", "--app", "app_name", metavar="APP", help="The Celery application, as for celery -A.")
@click.option(
    "--gpus", callback=_listed, metavar="LIST", help="One process for each of these GPUs: 0,1 or their UUIDs."
)
@click.option(
    "--processes", type=click.IntRange(min=1), help="So many processes without a GPU of their own.  [default: 1]"
)
@click.option("-Q", "--queues", metavar="LIST", help="Queues to consume, with commas between.")
@click.option("-n", "--name", metavar="NAME", help="Name of the node; several get a number or their GPU behind it.")
@click.option("-l", "--loglevel", type=click.Choice(LEVELS, case_sensitive=False), default="INFO", show_default=True)
@click.option(
    "--give-up-after",
    type=click.IntRange(min=1),
    metavar="N",
    help="End with its exit code when a process has died N times in a row, each within a minute.  [default: never]",
)
@click.option("-o", "--option", "more", multiple=True, help="One more for celery worker, as in -o --without-gossip.")
@click.pass_context
def worker(
    context: click.Context,
    app_name: str | None,
    gpus: list[str],
    processes: int | None,
    queues: str | None,
    name: str | None,
    loglevel: str,
    give_up_after: int | None,
    more: tuple[str, ...],
) -> None:
    """Run worker processes and start them anew when they die.

    What a dead process held goes back to its queues at once. SIGTERM and Ctrl-C let running batches finish.
    """
    if context.invoked_subcommand is not None:
        context.obj = app_name
        return
    if gpus and processes is not None:
        raise click.UsageError("--gpus says how many processes there are; leave out --processes")
    app = _load(app_name)
    _log_to_stderr(loglevel)

    from .fleet import Fleet, worker_commands
    from .tasks.leases import LeaseBook
    from .workers.bootsteps import DEFAULT_GRACE_S
    from .workers.transport import is_redis

    options = ["-l", loglevel.upper(), *(["-Q", queues] if queues else []), *more]
    grace_s = float(app.conf.get("busload_shutdown_grace_s", DEFAULT_GRACE_S)) + STOP_MARGIN_S
    commands = worker_commands(
        str(app_name), grace_s=grace_s, gpus=gpus, processes=processes or 1, name=name, options=options
    )
    take_back = (lambda dead: LeaseBook.of(app).take_back(dead)) if is_redis(app.connection_for_write()) else None
    sys.exit(Fleet(commands, take_back, give_up_after).run())


@worker.command()
@click.option("-A", "--app", "app_name", metavar="APP", help="The Celery application, as for celery -A.")
@click.option("--force", is_flag=True, help="Take from workers that live as well: what they run now runs twice.")
@click.option("--json", "as_json", is_flag=True, help="Print what went back as JSON.")
@click.pass_obj
def eject(app_of_worker: str | None, app_name: str | None, force: bool, as_json: bool) -> None:
    """Give all messages that busload's workers hold back to Celery's own lists.

    For leaving busload, or after an accident. Stop the workers first: while a lease is alive nothing is given back.
    """
    from .eject import LeasesAlive
    from .eject import eject as give_back
    from .fleet import AWAY
    from .workers.transport import is_redis

    app = _load(app_name or app_of_worker)
    if not is_redis(app.connection_for_write()):
        raise click.ClickException("the broker is not Redis: busload holds nothing there that the broker does not know")
    try:
        ejected = give_back(app, force)
    except LeasesAlive as error:
        _show_alive(error, as_json)
        sys.exit(1)
    except AWAY as error:
        raise click.ClickException(f"the broker is away: {error}") from error
    total = sum(went.messages for went in ejected)
    if as_json:
        rows = [{"holder": went.holder, "list": went.list, "messages": went.messages} for went in ejected]
        click.echo(json.dumps({"messages": total, "ejected": rows}))
    elif not ejected:
        click.echo("No worker of busload holds a message.")
    else:
        columns = [(went.holder, went.list, str(went.messages)) for went in ejected]
        _print_table(f"{total} messages went back", ("holder", "list", "messages"), columns)


def _show_alive(error: LeasesAlive, as_json: bool) -> None:
    if as_json:
        rows = [
            {"holder": holder.incarnation, "messages": holder.messages, "ends_in_s": round(holder.ends_in_s, 3)}
            for holder in error.holders
        ]
        click.echo(json.dumps({"alive": rows}))
    else:
        columns = [(holder.incarnation, str(holder.messages), f"{holder.ends_in_s:.0f} s") for holder in error.holders]
        _print_table("Leases that are alive", ("holder", "messages", "ends in"), columns)
    click.echo("Nothing went back. Stop these workers, or wait until their leases end, or use --force.", err=True)


def _print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    table = Table(title=title)
    for number, column in enumerate(columns):
        table.add_column(column, overflow="fold", justify="right" if number == len(columns) - 1 else "left")
    for row in rows:
        table.add_row(*row)
    Console(highlight=False).print(table)


def _load(app_name: str | None) -> Celery:
    if app_name is None:
        raise click.UsageError("-A says whose application it is, as in: busload worker -A inference")
    from celery.app.utils import find_app

    try:
        app: Celery = find_app(app_name)
    except (ImportError, AttributeError, ValueError) as error:
        raise click.ClickException(f"cannot load the application {app_name}: {error}") from error
    return app


def _log_to_stderr(level: str) -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter(LOG_FORMAT))
    logger = logging.getLogger("busload.fleet")
    logger.addHandler(handler)
    logger.setLevel(level.upper())
    logger.propagate = False
