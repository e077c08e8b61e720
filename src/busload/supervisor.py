"""Start commands as children that never outlive this process, and learn which of them died, and why.

Every child runs under its own `watchdog.py`, which ends it when this process is gone, kill -9 included. Two
pipes join this process to a watchdog: while we hold the one to its stdin, the command may live; the other
tells the command's pid and reaches end-of-file when the watchdog ends, which is how a death is noticed
without polling. Children get a session of their own, so Ctrl-C in a terminal reaches only this process.
That a watchdog has ended does not always mean that its command has: `Child.is_gone()` asks the kernel.
"""

import contextlib
import os
import select
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from .batching import BusloadError

WATCHDOG_PATH = Path(__file__).with_name("watchdog.py")
WATCHDOG_MARGIN_S = 5.0  # beyond the grace, for the watchdog itself to kill, collect and exit
PID_POLL_S = 0.01
LOG_TAIL_LINES = 20
LOG_TAIL_BYTES = 8192


class SupervisorError(BusloadError):
    """A child could not be started, or the supervisor was asked for what it cannot do."""


@dataclass(frozen=True)
class Command:
    """What to run, under a name that is also its log's.

    `env` is added to this process's environment; `grace_s` is the time from SIGTERM to SIGKILL.
    """

    name: str
    argv: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)
    cwd: Path | None = None
    grace_s: float = 10.0


@dataclass(frozen=True)
class ChildDeath:
    """How a child ended: `exit_code` in shell notation (128 + n for signal n) and the end of its log."""

    name: str
    exit_code: int
    log_tail: str

    def __str__(self) -> str:
        return f"{self.name} ended with {describe(self.exit_code)}; its log ends with:\n{self.log_tail}"


class Child:
    """One command under its watchdog; its stdout and stderr are appended to `log_path`, or are ours without one.

    It can be started once. Dropping the last reference to a running child ends the command.
    """

    def __init__(self, command: Command, log_path: Path | None = None) -> None:
        self.command = command
        self.log_path = log_path
        self._watchdog: subprocess.Popen[bytes] | None = None
        self._status_fd = -1
        self._pid: int | None = None
        self._pidfd: _PidFd | None = None

    @property
    def pid(self) -> int:
        """The pid of the command itself, which is also its process group."""
        if self._pid is None:
            raise SupervisorError(f"{self.command.name} was not started")
        return self._pid

    @property
    def watchdog_pid(self) -> int:
        """The pid of the command's watchdog."""
        return self._started_watchdog().pid

    def start(self) -> None:
        """Return as soon as the command has a pid; that it could not be executed shows as exit code 127.

        Raises `OSError` when the log, the working folder or Python cannot be opened, `SupervisorError` when
        the watchdog ended before the command began.
        """
        if self._watchdog is not None:
            raise SupervisorError(f"{self.command.name} was started before")
        self._watchdog = self._start_watchdog()
        try:
            reported = os.read(self._status_fd, 32)  # pid and newline in one write, or the end
            if not reported:
                raise SupervisorError(f"no watchdog for {self.command.name}: {self.log_tail()}")
            self._pid = int(reported)
            self._pidfd = _PidFd.open(self._pid)
        except BaseException:
            self.stop()
            raise

    def wait(self, timeout_s: float | None = None) -> int | None:
        """The exit code in shell notation, or None when the child still runs after `timeout_s` seconds."""
        watchdog = self._started_watchdog()
        if watchdog.returncode is None:
            if not _first_ended([self], timeout_s):
                return None
            self._collect(watchdog)
        return watchdog.returncode if watchdog.returncode >= 0 else 128 - watchdog.returncode

    def poll(self) -> int | None:
        """The exit code in shell notation, or None while the child runs."""
        return self.wait(timeout_s=0)

    def is_gone(self, timeout_s: float = 0.0) -> bool:
        """Whether the kernel says that the command itself has ended, after at most `timeout_s` seconds of waiting.

        It takes a while to follow a watchdog that was killed. Without Linux's pidfd a process that has got its pid
        counts as the command still living.
        """
        if self._pidfd is not None:
            return self._pidfd.has_ended(timeout_s)
        deadline = time.monotonic() + timeout_s
        while _exists(self.pid):
            if time.monotonic() >= deadline:
                return False
            time.sleep(PID_POLL_S)
        return True

    def send_signal(self, signum: signal.Signals) -> None:
        """Send a signal to the command itself, unless it has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # its watchdog is about to say so
                os.kill(self.pid, signum)

    def request_stop(self) -> None:
        """Make the watchdog end the command within the grace; returns at once."""
        stdin = self._started_watchdog().stdin
        if stdin is not None:
            stdin.close()

    def stop(self) -> int:
        """End the command (SIGTERM, grace, SIGKILL) and wait for that; the exit code in shell notation."""
        self.request_stop()
        while (exit_code := self.wait(self.command.grace_s + WATCHDOG_MARGIN_S)) is None:
            self._started_watchdog().kill()  # it hangs itself; collecting it kills what it watched
        return exit_code

    def death(self) -> ChildDeath:
        """How the child ended; `SupervisorError` while it runs."""
        exit_code = self.poll()
        if exit_code is None:
            raise SupervisorError(f"{self.command.name} is still running")
        return ChildDeath(self.command.name, exit_code, self.log_tail())

    def log_tail(self) -> str:
        """The last lines of the log, at most `LOG_TAIL_LINES`; nothing without a log."""
        if self.log_path is None:
            return ""
        with self.log_path.open("rb") as log:
            size = log.seek(0, os.SEEK_END)
            log.seek(max(0, size - LOG_TAIL_BYTES))
            lines = log.read().decode(errors="replace").splitlines()
        return "\n".join(lines[-LOG_TAIL_LINES:])

    def fileno(self) -> int:
        """A file descriptor that becomes readable when the child has ended; -1 once that has been noticed."""
        return self._status_fd

    def _started_watchdog(self) -> subprocess.Popen[bytes]:
        if self._watchdog is None:
            raise SupervisorError(f"{self.command.name} was not started")
        return self._watchdog

    def _start_watchdog(self) -> subprocess.Popen[bytes]:
        status_reader, status_writer = os.pipe()
        # -I keeps this folder out of sys.path: its files may be named like the standard library's.
        python = [sys.executable, "-I", "-S", str(WATCHDOG_PATH)]
        options = ["--grace-s", str(self.command.grace_s), "--status-fd", str(status_writer)]
        try:
            with contextlib.nullcontext() if self.log_path is None else self.log_path.open("ab") as log:
                watchdog = subprocess.Popen(
                    [*python, *options, "--", *self.command.argv],
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                    env={**os.environ, **self.command.env},
                    cwd=self.command.cwd,
                    start_new_session=True,
                    pass_fds=[status_writer],
                )
        except BaseException:
            os.close(status_reader)
            raise
        finally:
            os.close(status_writer)
        self._status_fd = status_reader
        return watchdog

    def _collect(self, watchdog: subprocess.Popen[bytes]) -> None:
        watchdog.wait()
        self.request_stop()
        os.close(self._status_fd)
        self._status_fd = -1
        if watchdog.returncode < 0 and self._pid is not None:
            # A watchdog that was killed could not clean up, and the kernel ended only the command itself.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._pid, signal.SIGKILL)


class Supervisor:
    """Starts children, reports the first that dies, and ends them all in reverse order of start.

    Used as a context manager or with `stop()`. Not for use from several threads at once.
    """

    def __init__(self, log_dir: Path) -> None:
        """`log_dir` must exist; each child's output goes to `NAME.log` in it."""
        self._log_dir = log_dir
        self._stages: list[list[Child]] = []  # in order of start; a stage is stopped as one

    def start(self, command: Command) -> Child:
        """Start one command. A start that fails stops all children before it raises (see `Child.start`)."""
        return self.start_together([command])[0]

    def start_together(self, commands: Iterable[Command]) -> list[Child]:
        """Start commands that do not need each other, so that they can also be stopped at the same time."""
        stage: list[Child] = []
        self._stages.append(stage)
        try:
            for command in commands:
                self._refuse_taken(command.name)
                child = Child(command, self._log_dir / f"{command.name}.log")
                child.start()
                stage.append(child)
        except BaseException:
            self.stop()
            raise
        return list(stage)

    def adopt(self, child: Child) -> None:
        """Take over a child that was started elsewhere: report its death and stop it with the others."""
        self._refuse_taken(child.command.name)
        self._stages.append([child])

    def wait(self, timeout_s: float | None = None) -> ChildDeath | None:
        """The death of one child, each told once, earliest started first; None when none died in `timeout_s`.

        Raises `SupervisorError` when no child is left to wait for.
        """
        children = self._children()
        if not children:
            raise SupervisorError("there is no child to wait for")
        ended = _first_ended(children, timeout_s)
        if ended is None:
            return None
        others = ([child for child in stage if child is not ended] for stage in self._stages)
        self._stages = [stage for stage in others if stage]
        return ended.death()

    def stop(self) -> None:
        """End all children: stages in reverse order of start, each child within its grace."""
        while self._stages:
            stage = self._stages[-1]
            for child in stage:
                child.request_stop()
            for child in stage:
                child.stop()
            self._stages.pop()  # only now: a stop that was interrupted can be repeated

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def _children(self) -> list[Child]:
        return [child for stage in self._stages for child in stage]

    def _refuse_taken(self, name: str) -> None:
        if any(child.command.name == name for child in self._children()):
            raise SupervisorError(f"a child named {name} is running already")


def _first_ended(children: Sequence[Child], timeout_s: float | None) -> Child | None:
    """The first of `children` that has ended, waiting at most `timeout_s` seconds for one to end."""
    noticed = [child for child in children if child.fileno() < 0]
    if noticed:
        return noticed[0]
    with selectors.DefaultSelector() as selector:
        for child in children:
            selector.register(child, selectors.EVENT_READ)
        ready = {key.fileobj for key, _ in selector.select(timeout_s)}
    return next((child for child in children if child in ready), None)


class _PidFd:
    """Linux's handle of a process, which no other process ever gets."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    @classmethod
    def open(cls, pid: int) -> Self | None:
        """Return that of a process; None where there are none, or when the process has been collected already."""
        if sys.platform != "linux":
            return None
        try:
            return cls(os.pidfd_open(pid))
        except OSError:  # also a kernel that is too old, or a sandbox
            return None

    def has_ended(self, timeout_s: float) -> bool:
        poll = select.poll()  # unlike select() for any number of open files
        poll.register(self._fd, select.POLLIN)
        return bool(poll.poll(timeout_s * 1000))

    def __del__(self) -> None:
        os.close(self._fd)


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # it is somebody else's by now
        return True
    return True


def describe(exit_code: int) -> str:
    """Return an exit code in words, with the name of the signal that it stands for."""
    if exit_code <= 128:
        return f"exit code {exit_code}"
    try:
        return f"exit code {exit_code} ({signal.Signals(exit_code - 128).name})"
    except ValueError:
        return f"exit code {exit_code}"
