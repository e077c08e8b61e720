"""What processes have used so far, read from outside and to the nanosecond. Linux only."""

from __future__ import annotations

import ctypes
import os
import time
from pathlib import Path


class CpuClock:
    """The CPU time of processes: all their threads, those that have ended included."""

    def __init__(self, *pids: int) -> None:
        """Raises ProcessLookupError when one is not there."""
        self._clocks = [_clock_of(pid) for pid in pids]

    def seconds(self) -> float:
        """Return the CPU time since the processes began."""
        return sum(map(time.clock_gettime, self._clocks))


def children_of(pid: int) -> list[int]:
    """Return the ids of the processes that ``pid`` has started."""
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for task in tasks for child in task.read_text().split()]


def resident_mib(pid: int) -> float:
    """Return the memory that a process occupies, in MiB."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def _clock_of(pid: int) -> int:
    clock = ctypes.c_int()
    error = ctypes.CDLL(None).clock_getcpuclockid(pid, ctypes.byref(clock))
    if error:
        raise ProcessLookupError(error, f"{os.strerror(error)}: {pid}")
    return clock.value
