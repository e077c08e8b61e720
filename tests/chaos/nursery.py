"""Starts workers by forking a process that has imported everything, so that many can be started and killed in a minute.

Reads lines ``INCARNATION NAME LOG`` from its input and answers each with the process id of a new worker.
"""

from __future__ import annotations

import os
import signal
import sys

from celery.bin.celery import main as celery

from tests.chaos import chaos_app


def become_worker(incarnation: str, name: str, log: str) -> None:
    os.environ["BUSLOAD_INCARNATION"] = incarnation
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    sys.argv = ["celery", "-A", chaos_app.__name__, "worker", "-P", "threads", "-c", "1", "-l", "WARNING"]
    sys.argv += ["-n", name, "--without-mingle", "--without-gossip"]
    sys.exit(celery())


def main() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the dead need no burial
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            become_worker(*line.split())
        print(pid, flush=True)


if __name__ == "__main__":
    main()
