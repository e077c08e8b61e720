"""Children under a supervisor: their deaths are told, and none is left behind; real processes throughout."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

import busload.supervisor
from busload.supervisor import Child, ChildDeath, Command, Supervisor, SupervisorError

DEADLINE_S = 10.0
SLEEP = ("sleep", "600")


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


def shell(name: str, script: str, grace_s: float = 10.0) -> Command:
    return Command(name, ["sh", "-c", script], grace_s=grace_s)


def journalled(name: str, journal: Path) -> Command:
    """A command that appends its name to `journal` when it is told to stop."""
    return shell(name, f"trap 'echo {name} >> {journal}; exit' TERM; echo up; while :; do sleep 0.01; done")


def up(child: Child) -> bool:
    return child.log_tail() == "up"


def test_child_runs_with_its_environment_folder_and_log(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    command = Command("show", ["sh", "-c", "echo $COLOUR; pwd >&2"], env={"COLOUR": "red"}, cwd=folder)
    with Supervisor(tmp_path) as supervisor:
        assert supervisor.start(command).wait(DEADLINE_S) == 0
    assert (tmp_path / "show.log").read_text() == f"red\n{folder}\n"


def test_pid_is_the_commands_own(tmp_path: Path) -> None:
    with Supervisor(tmp_path) as supervisor:
        child = supervisor.start(shell("tell", "echo $$; exec sleep 600"))
        eventually(lambda: child.log_tail() != "")
        assert child.pid == int(child.log_tail())
        assert os.getsid(child.pid) == child.pid


def test_death_is_told_with_exit_code_and_end_of_log(tmp_path: Path) -> None:
    with Supervisor(tmp_path) as supervisor:
        supervisor.start(Command("steady", SLEEP))
        supervisor.start(shell("faulty", "for n in $(seq 30); do echo line $n; done; exit 3"))
        death = supervisor.wait(DEADLINE_S)
    lines = "\n".join(f"line {n}" for n in range(11, 31))
    assert death == ChildDeath("faulty", 3, lines)
    assert str(death) == f"faulty ended with exit code 3; its log ends with:\n{lines}"


def test_each_death_is_told_once_and_frees_the_name(tmp_path: Path) -> None:
    with Supervisor(tmp_path) as supervisor:
        for _ in range(2):
            supervisor.start(shell("short", "exit 1"))
            death = supervisor.wait(DEADLINE_S)
            assert death is not None
            assert death.name == "short"
        with pytest.raises(SupervisorError, match="no child to wait for"):
            supervisor.wait()


def test_death_noticed_by_the_child_is_still_told_by_the_supervisor(tmp_path: Path) -> None:
    with Supervisor(tmp_path) as supervisor:
        supervisor.start(Command("steady", SLEEP))
        assert supervisor.start(shell("short", "exit 1")).wait(DEADLINE_S) == 1
        death = supervisor.wait(DEADLINE_S)
    assert death is not None
    assert death.name == "short"


def test_no_death_within_the_time_is_none(tmp_path: Path) -> None:
    with Supervisor(tmp_path) as supervisor:
        supervisor.start(Command("steady", SLEEP))
        assert supervisor.wait(timeout_s=0) is None


def test_killed_command_is_named_by_its_signal(tmp_path: Path) -> None:
    with Supervisor(tmp_path) as supervisor:
        supervisor.start(Command("victim", SLEEP)).send_signal(signal.SIGKILL)
        death = supervisor.wait(DEADLINE_S)
    assert str(death) == "victim ended with exit code 137 (SIGKILL); its log ends with:\n"


def test_command_that_cannot_run_is_a_death_that_says_why(tmp_path: Path) -> None:
    with Supervisor(tmp_path) as supervisor:
        supervisor.start(Command("absent", ["./missing"]))
        death = supervisor.wait(DEADLINE_S)
    message = "watchdog: cannot run ./missing: No such file or directory"
    assert death == ChildDeath("absent", 127, message)


def test_stop_ends_children_in_reverse_order_of_start(tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    with Supervisor(tmp_path) as supervisor:
        for name in ["server", "worker", "api"]:
            eventually(partial(up, supervisor.start(journalled(name, journal))))
    assert journal.read_text().split() == ["api", "worker", "server"]


def test_children_started_together_are_stopped_together(tmp_path: Path) -> None:
    # Each ends only after it has seen that the other was told to end too.
    script = "trap 'touch {me}; until test -e {other}; do sleep 0.01; done; exit 5' TERM; echo up; "
    script += "while :; do sleep 0.01; done"
    commands = [
        Command(me, ["sh", "-c", script.format(me=me, other=other)], cwd=tmp_path, grace_s=600)
        for me, other in [("left", "right"), ("right", "left")]
    ]
    with Supervisor(tmp_path) as supervisor:
        children = supervisor.start_together(commands)
        eventually(lambda: all(map(up, children)))
    assert [child.poll() for child in children] == [5, 5]


def test_child_that_ignores_sigterm_is_killed_after_its_grace(tmp_path: Path) -> None:
    with Supervisor(tmp_path) as supervisor:
        child = supervisor.start(shell("stubborn", "trap '' TERM; echo up; while :; do sleep 600; done", 0.1))
        eventually(partial(up, child))
    assert child.poll() == 128 + signal.SIGKILL


def test_hanging_watchdog_is_killed_with_all_it_watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(busload.supervisor, "WATCHDOG_MARGIN_S", 0.1)
    with Supervisor(tmp_path) as supervisor:
        child = supervisor.start(shell("busy", "sleep 600 & echo $!; wait", grace_s=0.1))
        eventually(lambda: child.log_tail() != "")
        os.kill(child.watchdog_pid, signal.SIGSTOP)
    grandchild = int(child.log_tail())
    eventually(lambda: not running(child.pid) and not running(grandchild))


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is Linux's")
def test_killed_watchdog_is_a_death_and_leaves_no_process(tmp_path: Path) -> None:
    with Supervisor(tmp_path) as supervisor:
        child = supervisor.start(shell("busy", "sleep 600 & echo $!; wait"))
        eventually(lambda: child.log_tail() != "")
        os.kill(child.watchdog_pid, signal.SIGKILL)
        death = supervisor.wait(DEADLINE_S)
    assert death is not None
    assert death.exit_code == 128 + signal.SIGKILL
    eventually(lambda: not running(child.pid) and not running(int(death.log_tail)))


def test_without_a_log_a_child_writes_where_we_do(capfd: pytest.CaptureFixture[str]) -> None:
    child = Child(shell("loud", "echo out; echo err >&2; exit 3"))
    child.start()
    assert child.wait(DEADLINE_S) == 3
    assert capfd.readouterr() == ("out\n", "err\n")
    assert child.death() == ChildDeath("loud", 3, "")


@pytest.mark.parametrize("with_pidfd", [True, False])
def test_the_kernel_says_when_a_command_is_gone(with_pidfd: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not with_pidfd:
        monkeypatch.setattr(busload.supervisor._PidFd, "open", lambda pid: None)
    child = Child(Command("sleep", SLEEP))
    child.start()
    assert not child.is_gone()
    assert not child.is_gone(timeout_s=0.02)
    child.send_signal(signal.SIGKILL)
    assert child.is_gone(DEADLINE_S)
    assert child.stop() == 128 + signal.SIGKILL
    assert child.is_gone()


def test_failed_start_stops_the_children_before_it(tmp_path: Path) -> None:
    supervisor = Supervisor(tmp_path)
    first = supervisor.start(Command("first", SLEEP))
    with pytest.raises(FileNotFoundError):
        supervisor.start_together([Command("second", SLEEP), Command("third", SLEEP, cwd=tmp_path / "missing")])
    assert not running(first.pid)
    with pytest.raises(SupervisorError, match="no child to wait for"):
        supervisor.wait()


def test_names_must_differ(tmp_path: Path) -> None:
    with Supervisor(tmp_path) as supervisor:
        supervisor.start(Command("worker", SLEEP))
        with pytest.raises(SupervisorError, match="a child named worker is running already"):
            supervisor.start(Command("worker", SLEEP))


def test_adopted_child_is_reported_and_stopped(tmp_path: Path) -> None:
    owner, supervisor = Supervisor(tmp_path), Supervisor(tmp_path)
    quick, steady = owner.start(shell("quick", "exit 2")), owner.start(Command("steady", SLEEP))
    with supervisor:
        supervisor.adopt(quick)
        supervisor.adopt(steady)
        assert supervisor.wait(DEADLINE_S) == ChildDeath("quick", 2, "")
    assert steady.poll() == 128 + signal.SIGTERM
    owner.stop()


def test_killed_supervisor_leaves_no_process(tmp_path: Path) -> None:
    script = (
        "from pathlib import Path; from busload.supervisor import Command, Supervisor;"
        "supervisor = Supervisor(Path('.'));"
        "supervisor.start(Command('one', ['sh', '-c', 'sleep 600 & echo $! $$; wait']));"
        "supervisor.start(Command('two', ['sh', '-c', 'echo $$; exec sleep 600']));"
        "supervisor.wait()"
    )
    source = str(Path(busload.supervisor.__file__).parents[1])
    logs = [tmp_path / "one.log", tmp_path / "two.log"]
    with subprocess.Popen(
        [sys.executable, "-c", script], cwd=tmp_path, env={**os.environ, "PYTHONPATH": source}
    ) as parent:
        eventually(lambda: all(log.exists() and log.read_text().endswith("\n") for log in logs))
        parent.kill()
    pids = [int(word) for log in logs for word in log.read_text().split()]
    eventually(lambda: not any(map(running, pids)))
