"""The watchdog ends its command whenever nobody wants it any more; real processes throughout."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import busload.watchdog

DEADLINE_S = 10.0
WATCHDOG = [sys.executable, "-I", "-S", busload.watchdog.__file__]
SLEEPER = ["sh", "-c", "sleep 600 & echo $$ $! > pids; wait"]
STUBBORN = ["sh", "-c", "trap '' TERM; sleep 600 & echo $$ $! > pids; while :; do wait; done"]

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is Linux's")


def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, "the condition did not become true in time"
        time.sleep(0.01)


def running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


@contextmanager
def watchdog(folder: Path, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([*WATCHDOG, *arguments], cwd=folder, stdin=subprocess.PIPE)
    assert process.stdin is not None
    try:
        yield process
    finally:
        process.stdin.close()
        process.wait(DEADLINE_S)


def read_pids(folder: Path) -> list[int]:
    """The pids that a command wrote, once they are there."""
    file = folder / "pids"
    eventually(lambda: file.exists() and file.read_text().endswith("\n"))
    return [int(word) for word in file.read_text().split()]


@pytest.mark.parametrize("code", [0, 3, 127])
def test_exit_code_of_the_command_passes_through(tmp_path: Path, code: int) -> None:
    with watchdog(tmp_path, "--", "sh", "-c", f"exit {code}") as process:
        assert process.wait(DEADLINE_S) == code


def test_command_ended_by_a_signal_gives_128_plus_its_number(tmp_path: Path) -> None:
    with watchdog(tmp_path, "--", "sh", "-c", "kill -9 $$") as process:
        assert process.wait(DEADLINE_S) == 128 + signal.SIGKILL


def test_arguments_of_the_command_stay_as_they_are(tmp_path: Path) -> None:
    script = 'printf "%s\\n" "$@" > words'
    with watchdog(tmp_path, "--", "sh", "-c", script, "sh", "--grace-s", "--", "a b", "") as process:
        assert process.wait(DEADLINE_S) == 0
    assert (tmp_path / "words").read_text() == "--grace-s\n--\na b\n\n"


def test_missing_command_is_127_and_says_so(tmp_path: Path) -> None:
    with subprocess.Popen(
        [*WATCHDOG, "--", "./missing"], cwd=tmp_path, stdin=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stderr is not None
        assert process.stderr.read() == b"watchdog: cannot run ./missing: No such file or directory\n"
    assert process.returncode == 127


def test_runs_as_a_module_too() -> None:
    command = [sys.executable, "-m", "busload.watchdog", "--", "sh", "-c", "exit 5"]
    environment = {**os.environ, "PYTHONPATH": str(Path(busload.watchdog.__file__).parents[1])}
    with subprocess.Popen(command, stdin=subprocess.PIPE, env=environment) as process:
        assert process.wait(DEADLINE_S) == 5


def test_command_has_its_own_session_no_stdin_and_default_signals(tmp_path: Path) -> None:
    script = (
        "import os, signal; from pathlib import Path;"
        "default = all(signal.getsignal(s) == signal.SIG_DFL for s in (signal.SIGTERM, signal.SIGCHLD));"
        "blocked = signal.pthread_sigmask(signal.SIG_BLOCK, []);"
        "stdin = os.read(0, 1);"
        "Path('seen').write_text(repr((os.getsid(0) == os.getpid(), default, blocked, stdin)))"
    )
    with watchdog(tmp_path, "--", sys.executable, "-c", script) as process:
        assert process.wait(DEADLINE_S) == 0
    assert (tmp_path / "seen").read_text() == "(True, True, set(), b'')"


def test_end_of_file_on_stdin_ends_the_command(tmp_path: Path) -> None:
    with watchdog(tmp_path, "--", *SLEEPER) as process:
        pids = read_pids(tmp_path)
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(DEADLINE_S) == 128 + signal.SIGTERM
    eventually(lambda: not any(map(running, pids)))


def test_bytes_on_stdin_mean_nothing(tmp_path: Path) -> None:
    with watchdog(tmp_path, "--", "sh", "-c", "until test -e go; do sleep 0.01; done; exit 4") as process:
        assert process.stdin is not None
        process.stdin.write(b"still here")
        process.stdin.flush()
        (tmp_path / "go").touch()
        assert process.wait(DEADLINE_S) == 4


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_stop_signal_is_forwarded_as_sigterm(tmp_path: Path, signum: signal.Signals) -> None:
    script = "trap 'exit 7' TERM; echo $$ > pids; while :; do sleep 0.01; done"
    with watchdog(tmp_path, "--", "sh", "-c", script) as process:
        read_pids(tmp_path)
        process.send_signal(signum)
        assert process.wait(DEADLINE_S) == 7


def test_command_that_ignores_sigterm_is_killed_after_the_grace(tmp_path: Path) -> None:
    with watchdog(tmp_path, "--grace-s", "0.1", "--", *STUBBORN) as process:
        pids = read_pids(tmp_path)
        process.terminate()
        assert process.wait(DEADLINE_S) == 128 + signal.SIGKILL
    eventually(lambda: not any(map(running, pids)))


def test_second_stop_signal_does_not_shorten_the_grace(tmp_path: Path) -> None:
    script = "trap 'touch got' TERM; echo $$ > pids; until test -e go; do sleep 0.01; done; exit 6"
    with watchdog(tmp_path, "--grace-s", "600", "--", "sh", "-c", script) as process:
        read_pids(tmp_path)
        process.terminate()
        eventually((tmp_path / "got").exists)
        process.terminate()
        (tmp_path / "go").touch()
        assert process.wait(DEADLINE_S) == 6


def test_stopped_command_is_continued_so_that_it_can_end(tmp_path: Path) -> None:
    with watchdog(tmp_path, "--grace-s", "600", "--", *SLEEPER) as process:
        os.kill(read_pids(tmp_path)[0], signal.SIGSTOP)
        process.terminate()
        assert process.wait(DEADLINE_S) == 128 + signal.SIGTERM


def test_what_the_command_leaves_in_its_group_is_killed(tmp_path: Path) -> None:
    with watchdog(tmp_path, "--", "sh", "-c", "sleep 600 & echo $! > pids") as process:
        assert process.wait(DEADLINE_S) == 0
    (left_behind,) = read_pids(tmp_path)
    eventually(lambda: not running(left_behind))


def test_killed_parent_takes_command_and_grandchildren_along(tmp_path: Path) -> None:
    script = f"import subprocess; subprocess.Popen({[*WATCHDOG, '--', *SLEEPER]!r}, stdin=subprocess.PIPE).wait()"
    with subprocess.Popen([sys.executable, "-c", script], cwd=tmp_path) as parent:
        pids = read_pids(tmp_path)
        parent.kill()
    eventually(lambda: not any(map(running, pids)))


@linux_only
def test_killed_watchdog_takes_the_command_along(tmp_path: Path) -> None:
    with watchdog(tmp_path, "--", *STUBBORN) as process:
        command, grandchild = read_pids(tmp_path)
        process.kill()
        eventually(lambda: not running(command))
    os.kill(grandchild, signal.SIGKILL)  # the kernel's promise covers only the command itself


def test_status_pipe_tells_the_pid_and_ends_with_the_watchdog(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    arguments = ["--status-fd", str(writer), "--", *SLEEPER]
    with (
        open(reader, "rb") as status,
        subprocess.Popen([*WATCHDOG, *arguments], cwd=tmp_path, stdin=subprocess.PIPE, pass_fds=[writer]) as process,
    ):
        os.close(writer)
        assert int(status.readline()) == read_pids(tmp_path)[0]
        process.terminate()
        assert status.read() == b""
