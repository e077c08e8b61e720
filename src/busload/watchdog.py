"""Run one command, and end it when the process that asked for it is gone, however that one ended.

    python watchdog.py [--grace-s 10] [--status-fd FD] -- COMMAND [ARGUMENT...]

The parent holds the write end of a pipe that is this program's stdin. The kernel closes that end when the
parent exits, also by kill -9, so end-of-file on stdin means that nobody wants the command any more. The
parent must not pass the write end on: a copy in a forked child would keep the command alive.

The command gets a session and process group of its own, /dev/null as stdin, and this program's stdout and
stderr. It is ended by end-of-file on stdin and by SIGTERM or SIGINT to this program: SIGTERM to the command,
then, if it still runs after the grace, SIGKILL. However the command ended, the rest of its process group is
killed too. On Linux the kernel kills the command when this program itself is killed with SIGKILL.

Exit status: the command's; 128 + n when signal n ended it; 127 when it could not be run.

Start this file by its path with `python -I -S`: it needs only the standard library, so it is up in about
20 ms, and importing the package would cost far more.
"""

from __future__ import annotations

import argparse
import ctypes
import math
import os
import select
import signal
import sys
import time

STDIN = 0
STDERR = 2
READ_SIZE = 4096
EXIT_CANNOT_RUN = 127
PR_SET_PDEATHSIG = 1  # <linux/prctl.h>

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
WATCHED_SIGNALS = (*STOP_SIGNALS, signal.SIGCHLD)
# Python itself ignores the last two, and an ignored signal stays ignored through exec.
SIGNALS_RESET_FOR_COMMAND = (*WATCHED_SIGNALS, signal.SIGPIPE, signal.SIGXFSZ)


def main(arguments: list[str] | None = None) -> int:
    """Run the command given in `arguments` (default: the command line); the exit status to end with."""
    parser = argparse.ArgumentParser(prog="watchdog", description="Run COMMAND until it or stdin ends.")
    parser.add_argument("--grace-s", type=float, default=10.0, help="seconds between SIGTERM and SIGKILL")
    parser.add_argument("--status-fd", type=int, help="write the command's pid here; closed when all is over")
    parser.add_argument("command", nargs="+", metavar="COMMAND")
    options = parser.parse_args(arguments)
    if options.status_fd is not None:
        os.set_inheritable(options.status_fd, False)  # its end-of-file must mean that the watchdog ended

    wakeups = _watch_signals()
    pid = _start(options.command)
    if options.status_fd is not None:
        _report(options.status_fd, pid)
    return _supervise(pid, wakeups, options.grace_s)


def _watch_signals() -> int:
    """Turn the watched signals into bytes, one signal number each; the file descriptor to read them from."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    for signum in WATCHED_SIGNALS:
        signal.signal(signum, lambda *_: None)
    return reader


def _start(command: list[str]) -> int:
    """Fork and execute `command`; its pid."""
    # Loaded before the fork: the new process should do little before it executes the command.
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    watchdog_pid = os.getpid()
    # Blocked until the new process has default handlers: a signal taken by ours would be lost there.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, WATCHED_SIGNALS)
    pid = os.fork()
    if pid == 0:
        try:
            os.setsid()
            if libc is not None:
                libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != watchdog_pid:
                os._exit(128 + signal.SIGKILL)  # the watchdog died before the kernel knew of our wish
            os.dup2(os.open(os.devnull, os.O_RDONLY), STDIN)
            for signum in SIGNALS_RESET_FOR_COMMAND:
                signal.signal(signum, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            os.execvp(command[0], command)
        except OSError as error:
            os.write(STDERR, f"watchdog: cannot run {command[0]}: {error.strerror}\n".encode())
        finally:
            os._exit(EXIT_CANNOT_RUN)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    return pid


def _report(status_fd: int, pid: int) -> None:
    try:
        os.write(status_fd, b"%d\n" % pid)
    except BrokenPipeError:
        return  # the parent is gone already; end-of-file on stdin says so too


def _supervise(pid: int, wakeups: int, grace_s: float) -> int:
    """Wait until the command ends, ending it when it is time; its exit status in shell notation."""
    inputs = [wakeups, STDIN]
    kill_at = math.inf
    while (status := _ended(pid)) is None:
        patience_s = kill_at - time.monotonic()
        if patience_s <= 0:
            os.kill(pid, signal.SIGKILL)
            _, status = os.waitpid(pid, 0)
            break
        ready, _, _ = select.select(inputs, [], [], patience_s if patience_s < math.inf else None)
        received = os.read(wakeups, READ_SIZE) if wakeups in ready else b""
        stop = any(signum in received for signum in STOP_SIGNALS)
        if STDIN in ready and not os.read(STDIN, READ_SIZE):
            inputs.remove(STDIN)
            stop = True
        # A second request is no reason to hurry: service managers signal parent and watchdog alike.
        if stop and kill_at == math.inf:
            kill_at = time.monotonic() + grace_s
            os.kill(pid, signal.SIGTERM)
            os.kill(pid, signal.SIGCONT)  # a stopped command would not see the SIGTERM
    _kill_group(pid)
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def _ended(pid: int) -> int | None:
    ended_pid, status = os.waitpid(pid, os.WNOHANG)
    return status if ended_pid else None


def _kill_group(pid: int) -> None:
    """Kill what the command left behind. No new process gets the number of a group that has members."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):  # empty; macOS says the latter
        return


if __name__ == "__main__":
    sys.exit(main())
