"""Worker processes that are started anew when they die, while what they held goes back to its queues at once.

Every start of a process is an *incarnation* with a name of its own, under which it holds its messages. When the kernel
has confirmed that a process is gone, and not before, its incarnation is named dead to the broker.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import select
import signal
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from queue import SimpleQueue
from types import FrameType

from celery.utils.nodenames import host_format
from kombu.exceptions import KombuError
from redis import RedisError

from .supervisor import WATCHDOG_MARGIN_S, Child, Command, SupervisorError, describe
from .workers.leases import INCARNATION_VARIABLE

logger = logging.getLogger(__name__)

STEADY_S = 60.0
"""A process that dies younger than this makes its successor wait."""
LONGEST_DELAY_S = 30.0
TAKE_BACK_AGAIN_S = 1.0
TAKE_BACK_AT_END_S = 5.0

TakeBack = Callable[[str], int]
"""Gives back what an incarnation holds; returns how many messages. Raises an error of AWAY while the broker is away."""
AWAY = (OSError, RedisError, KombuError)

_POLL_S = 0.05
# Celery's handlers share a lock that is not reentrant: one signal in the handler of another hangs the worker.
_APART_S = 1.0
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT)
_READ_SIZE = 4096


def worker_commands(
    app: str,
    *,
    grace_s: float,
    gpus: Sequence[str] = (),
    processes: int = 1,
    name: str | None = None,
    options: Sequence[str] = (),
) -> list[Command]:
    """Return the commands of the workers of an application: one for each GPU, or ``processes`` without one.

    Each is named as its Celery node. ``name`` is that of a node, with or without a host; where there are several it
    is followed by a number, or the GPU. ``grace_s`` is the time from SIGTERM to SIGKILL. Processes without a GPU share
    the cores, unless OMP_NUM_THREADS says how many each computes on.
    """
    base, _, host = (name or "").partition("@")
    if gpus:
        labels = [f"gpu{gpu}" if gpu.isdigit() else gpu for gpu in gpus]
        names = [f"{base}-{label}" if base else label for label in labels]
    elif processes == 1:
        names = [base or "celery"]
    else:
        names = [f"{base or 'celery'}-{number}" for number in range(1, processes + 1)]
    shared_cores: dict[str, str] = {}
    if len(names) > 1 and "OMP_NUM_THREADS" not in os.environ:
        # By default each would take all of them, and models with more threads than cores run many times slower.
        shared_cores = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // len(names)))}
    commands = []
    for index, short_name in enumerate(names):
        node = host_format(f"{short_name}@{host or '%h'}", socket.gethostname())
        argv = [sys.executable, "-m", "celery", "-A", app, "worker", "-P", "threads", "-c", "1", "-n", node, *options]
        env = {"CUDA_VISIBLE_DEVICES": gpus[index]} if gpus else shared_cores
        commands.append(Command(node, argv, env, grace_s=grace_s))
    return commands


def restart_delay_s(quick_deaths: int, spread: float) -> float:
    """Return how long a process waits that starts after so many quick deaths in a row: 0, then about 1, 2, 4 … 30 s.

    ``spread`` between 0 and 1 takes up to half of it away, so that processes that died together do not meet again.
    """
    if quick_deaths < 2:
        return 0.0
    return float(min(2.0 ** min(quick_deaths - 2, 10), LONGEST_DELAY_S) * (1 - spread / 2))


class Fleet:
    """Runs workers until it is told to stop, one of them refuses its settings, or it gives up on one."""

    def __init__(
        self, commands: Sequence[Command], take_back: TakeBack | None, give_up_after: int | None = None
    ) -> None:
        """``take_back`` is None for brokers that notice a death themselves.

        ``give_up_after`` so many deaths in a row, each within STEADY_S of its start, everything ends.
        """
        self._give_up_after = give_up_after
        self._seats = [_Seat(command) for command in commands]
        self._undertaker = Undertaker(take_back)

    def run(self) -> int:
        """Return the exit code: 0 after SIGTERM, SIGINT or SIGQUIT, else that of the worker on whose account it ends.

        No process is left then. To be called on the main thread. SIGQUIT, and SIGINT while the workers stop, makes
        that a cold shutdown.
        """
        with _caught(_SIGNALS) as signals:
            self._undertaker.start()
            try:
                return self._keep_up(signals)
            finally:
                self._stop(signals)
                self._undertaker.close(TAKE_BACK_AT_END_S)

    def _keep_up(self, signals: _Signals) -> int:
        while True:
            now = time.monotonic()
            for seat in self._seats:
                if seat.child is None and seat.start_at <= now:
                    seat.start()
            self._wait(signals)
            if signals.seen:
                return 0
            for seat in self._seats:
                if (exit_code := seat.exit_code()) is None:
                    continue
                if exit_code == os.EX_CONFIG:
                    logger.error("%s refused its settings (exit code 78), as it says above; all stop", seat.name)
                    return exit_code
                delay_s = seat.vacate()
                is_last = self._give_up_after is not None and seat.quick_deaths >= self._give_up_after
                when = f"in {delay_s:.1f} s" if delay_s else "at once"
                outlook = f"death {seat.quick_deaths} in a row, all stop" if is_last else f"a fresh one starts {when}"
                news = f"{seat.name} (pid {seat.pid}) ended with {describe(exit_code)}"
                level = logging.ERROR if exit_code else logging.WARNING
                self._undertaker.bury(Death(seat.incarnation, news, outlook, level))
                if is_last:
                    return exit_code

    def _stop(self, signals: _Signals) -> None:
        """End all processes: running batches get their grace, unless a signal says otherwise."""
        running = self._seats = [seat for seat in self._seats if seat.child is not None]
        if running:
            logger.info("stopping %s", ", ".join(seat.name for seat in running))
        if signal.SIGQUIT in signals.seen:
            self._quit(running)
            self._wait_while_any_lives(running, signals, time.monotonic() + _APART_S)
        for seat in running:
            seat.request_stop()
        asked_at = time.monotonic()
        signals.seen.clear()
        give_up_at = asked_at + max((seat.command.grace_s for seat in running), default=0) + WATCHDOG_MARGIN_S
        while any(seat.exit_code() is None for seat in running) and time.monotonic() < give_up_at:
            if signals.seen & {signal.SIGINT, signal.SIGQUIT}:
                time.sleep(max(0.0, asked_at + _APART_S - time.monotonic()))
                self._quit(running)
            signals.seen.clear()
            self._wait(signals, give_up_at - time.monotonic())
        for seat in running:
            if seat.end():
                self._undertaker.bury(Death(seat.incarnation, f"{seat.name} has stopped"))
            else:
                logger.error("%s (pid %d) is not gone; its lease must run out", seat.name, seat.pid)

    def _wait_while_any_lives(self, running: list[_Seat], signals: _Signals, until: float) -> None:
        while any(seat.exit_code() is None for seat in running) and (left_s := until - time.monotonic()) > 0:
            self._wait(signals, left_s)

    def _quit(self, running: list[_Seat]) -> None:
        logger.warning("cold shutdown: running batches go back to their queues")
        for seat in running:
            seat.send_signal(signal.SIGQUIT)

    def _wait(self, signals: _Signals, at_most_s: float = float("inf")) -> None:
        """Wait for a signal, a death, or the time to start a process."""
        now = time.monotonic()
        timeouts = [seat.start_at - now for seat in self._seats if seat.child is None] + [at_most_s]
        poll = select.poll()
        poll.register(signals, select.POLLIN)
        for seat in self._seats:
            if seat.child is not None and seat.child.fileno() >= 0:
                poll.register(seat.child, select.POLLIN)
            elif seat.child is not None and not seat.child.is_gone():
                timeouts.append(_POLL_S)
        timeout_s = max(min(timeouts), 0.0)
        poll.poll(timeout_s * 1000 if timeout_s < float("inf") else None)
        signals.read()


class _Seat:
    """What one process after another runs in."""

    def __init__(self, command: Command) -> None:
        self.command = command
        self.child: Child | None = None
        self.incarnation = ""
        self.pid = 0
        self.start_at = 0.0
        self._started_at = 0.0
        self.quick_deaths = 0

    @property
    def name(self) -> str:
        return self.command.name

    def start(self) -> None:
        self.incarnation = f"{self.name}/{uuid.uuid4().hex}"
        self._started_at = time.monotonic()
        child = Child(replace(self.command, env={**self.command.env, INCARNATION_VARIABLE: self.incarnation}))
        try:
            child.start()
        except (OSError, SupervisorError) as error:
            logger.error("%s cannot be started, trying again in %.1f s: %s", self.name, self.vacate(), error)
            return
        self.child, self.pid = child, child.pid
        logger.info("started %s (pid %d)", self.name, self.pid)

    def exit_code(self) -> int | None:
        """Return that of the process once the kernel has confirmed that it is gone."""
        if self.child is None or (exit_code := self.child.poll()) is None or not self.child.is_gone():
            return None
        return exit_code

    def vacate(self) -> float:
        """Make way for the next process, and return in how many seconds it starts."""
        self.child = None
        now = time.monotonic()
        self.quick_deaths = self.quick_deaths + 1 if now - self._started_at < STEADY_S else 1
        delay_s = restart_delay_s(self.quick_deaths, random.random())
        self.start_at = now + delay_s
        return delay_s

    def request_stop(self) -> None:
        if self.child is not None:
            self.child.request_stop()

    def send_signal(self, signum: signal.Signals) -> None:
        if self.child is not None:
            self.child.send_signal(signum)

    def end(self) -> bool:
        """End the process if it has not; whether it is gone."""
        if self.child is None:
            return True
        self.child.stop()
        return self.child.is_gone(timeout_s=WATCHDOG_MARGIN_S)


@dataclass(frozen=True)
class Death:
    """An incarnation that is dead for certain, and what is said of it: ``news``, how many messages, ``outlook``.

    Without an outlook nothing is said unless there were messages.
    """

    incarnation: str
    news: str
    outlook: str = ""
    level: int = logging.WARNING


class Undertaker:
    """Gives back what the dead held, on a thread of its own, for the broker may be away."""

    def __init__(self, take_back: TakeBack | None) -> None:
        self._take_back = take_back
        self._deaths: SimpleQueue[Death | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="busload-undertaker", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def bury(self, death: Death) -> None:
        self._deaths.put(death)

    def close(self, timeout_s: float) -> None:
        """Give back what is still to be given back, as far as the broker allows it within the time."""
        self._deaths.put(None)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            logger.error("the broker is away; what the dead held goes back when their leases have run out")

    def _run(self) -> None:
        while (death := self._deaths.get()) is not None:
            self._bury(death)

    def _bury(self, death: Death) -> None:
        outlook = f"; {death.outlook}" if death.outlook else ""
        if self._take_back is None:
            if outlook:
                logger.log(death.level, "%s%s", death.news, outlook)
            return
        was_away = False
        while True:
            try:
                messages = self._take_back(death.incarnation)
                break
            except AWAY as error:
                if not was_away:
                    logger.log(death.level, "%s; its messages go back when the broker answers%s", death.news, outlook)
                    logger.warning("the broker is away, trying again: %s", error)
                was_away, outlook = True, ""
                time.sleep(TAKE_BACK_AGAIN_S)
        if messages or outlook or was_away:
            some = "1 message" if messages == 1 else f"{messages} messages"
            logger.log(death.level, "%s; %s went back to the queues%s", death.news, some, outlook)


@dataclass
class _Signals:
    """Signals that have come in, as a file that is readable when there are new ones."""

    fd: int
    seen: set[int] = field(default_factory=set)

    def fileno(self) -> int:
        return self.fd

    def read(self) -> None:
        with contextlib.suppress(BlockingIOError):
            # An application may have handlers of its own for others.
            self.seen.update(set(os.read(self.fd, _READ_SIZE)).intersection(_SIGNALS))


@contextlib.contextmanager
def _caught(signums: Sequence[signal.Signals]) -> Iterator[_Signals]:
    """Catch signals within the block."""

    def note(signum: int, frame: FrameType | None) -> None:
        """Do nothing: the number is in the pipe."""

    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    os.set_blocking(writer, False)
    handlers = {signum: signal.signal(signum, note) for signum in signums}
    wakeup_fd = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    try:
        yield _Signals(reader)
    finally:
        signal.set_wakeup_fd(wakeup_fd)
        for signum, handler in handlers.items():
            signal.signal(signum, handler)
        os.close(reader)
        os.close(writer)
