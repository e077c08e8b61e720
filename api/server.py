"""Serves the API with granian."""

from __future__ import annotations

import socket
from functools import partial
from pathlib import Path

import click
from apiflask import APIFlask
from granian import Granian
from granian.constants import Interfaces
from granian.log import LogLevels

from .app import create_app
from .broker import make_celery
from .settings import Settings
from .sweeping import sweep_in_background

STOP_TIMEOUT_S = 10
"""How long a process may take to finish its requests. One that is stopped while it starts may miss the signal, and is
killed after this."""
THREADS = 4
"""Of each process. Python runs one at a time anyway, but with one alone a client that sends its body slowly would
hold up all others."""


def serve(settings: Settings, host: str, port: int, workers: int, uds: Path | None = None) -> None:
    """Serve until SIGTERM or SIGINT; requests under way are finished first.

    Args:
        workers: how many processes.
        uds: path of a Unix socket to listen on instead of ``host`` and ``port``.

    Raises:
        OSError: the port is taken, or is no port of this machine.
        SystemExit: a process died.
    """
    if uds is None:
        _check_free(host, port)
    # Granian wants a target by name; the loader below is what it calls.
    server = Granian(
        "busload.api.app:create_app",
        address=host,
        port=port,
        uds=uds,
        interface=Interfaces.WSGI,
        workers=workers,
        blocking_threads=THREADS,
        workers_kill_timeout=STOP_TIMEOUT_S,
        log_level=LogLevels.warning,
    )
    server.on_startup(partial(click.echo, f"busload api on {f'unix:{uds}' if uds else f'http://{host}:{port}'}"))
    server.serve(target_loader=partial(_load, settings), wrap_loader=False)


def _load(settings: Settings) -> APIFlask:
    """Make the application of one process."""
    app = create_app(settings)
    sweep_in_background(make_celery(settings))
    return app


def _check_free(host: str, port: int) -> None:
    """Raise OSError where another server listens: granian's SO_REUSEPORT would share the port with it, unseen."""
    [(family, kind, protocol, _, address), *_] = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(address)
