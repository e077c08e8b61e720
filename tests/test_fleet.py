"""The fleet's own rules, on commands that are no workers."""

from __future__ import annotations

import logging
import os
import signal
import threading
from pathlib import Path

import pytest
import redis

from busload import fleet
from busload.fleet import Death, Fleet, Undertaker, restart_delay_s, worker_commands
from busload.supervisor import Child, Command
from tests.support import DEADLINE_S, is_running, until


def stop_me() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def test_processes_that_keep_dying_wait_longer_and_longer() -> None:
    assert [restart_delay_s(deaths, 0.0) for deaths in range(1, 10)] == [0, 1, 2, 4, 8, 16, 30, 30, 30]
    assert restart_delay_s(10**6, 1.0) == 15
    assert restart_delay_s(3, 0.5) == 1.5


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        ({}, ["celery@host"]),
        ({"processes": 2}, ["celery-1@host", "celery-2@host"]),
        ({"processes": 2, "name": "embed"}, ["embed-1@host", "embed-2@host"]),
        ({"name": "embed@%d"}, ["embed@tree"]),
        ({"gpus": ["0", "3"]}, ["gpu0@host", "gpu3@host"]),
        ({"gpus": ["0", "GPU-5d5e"], "name": "embed@here"}, ["embed-gpu0@here", "embed-GPU-5d5e@here"]),
    ],
)
def test_every_process_has_a_node_name(
    arguments: dict[str, object], names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet.socket, "gethostname", lambda: "host.tree")
    monkeypatch.setattr(fleet, "host_format", lambda text, host: text.replace("%h", "host").replace("%d", "tree"))
    commands = worker_commands("inference", grace_s=30, **arguments)  # type: ignore[arg-type]
    assert [command.name for command in commands] == names
    assert all(command.argv[command.argv.index("-n") + 1] == command.name for command in commands)


def test_each_process_sees_its_gpu_alone() -> None:
    commands = worker_commands("inference", grace_s=30, gpus=["0", "GPU-5d5e"], options=["-Q", "gpu"])
    assert [command.env for command in commands] == [
        {"CUDA_VISIBLE_DEVICES": "0"},
        {"CUDA_VISIBLE_DEVICES": "GPU-5d5e"},
    ]
    assert list(commands[0].argv[-2:]) == ["-Q", "gpu"]


def test_processes_without_a_gpu_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(fleet.os, "cpu_count", lambda: 8)
    assert [command.env for command in worker_commands("inference", grace_s=30, processes=3)] == [
        {"OMP_NUM_THREADS": "2"}
    ] * 3
    assert worker_commands("inference", grace_s=30)[0].env == {}
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert worker_commands("inference", grace_s=30, processes=3)[0].env == {}


def test_every_start_is_an_incarnation_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "restart_delay_s", lambda deaths, spread: 0.0)
    seen = tmp_path / "seen"
    dead: list[str] = []

    def take_back(incarnation: str) -> int:
        dead.append(incarnation)
        if len(dead) == 3:
            stop_me()
        return 0

    assert Fleet([Command("w@test", ["sh", "-c", f"echo $BUSLOAD_INCARNATION >> {seen}"])], take_back).run() == 0
    started = seen.read_text().split()
    assert len(set(started)) == len(started) >= 3
    assert started[:3] == dead[:3]
    assert all(incarnation.startswith("w@test/") for incarnation in started)


def test_nothing_is_taken_back_before_the_kernel_says_that_the_process_is_gone(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    running: list[bool] = []

    def kill_watchdog() -> None:
        pid = int(until(lambda: pid_file.exists() and pid_file.read_text()))
        os.kill(int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]), signal.SIGKILL)

    def take_back(incarnation: str) -> int:
        running.append(is_running(int(pid_file.read_text())))
        stop_me()
        return 0

    killer = threading.Thread(target=kill_watchdog)
    killer.start()
    script = f"test -e {pid_file} || echo $$ > {pid_file}; exec sleep 600"
    assert Fleet([Command("w@test", ["sh", "-c", script])], take_back).run() == 0
    killer.join()
    assert running[0] is False


def test_a_process_that_the_kernel_still_has_is_not_dead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Child, "is_gone", lambda self, timeout_s=0.0: False)
    monkeypatch.setattr(fleet, "WATCHDOG_MARGIN_S", 0.2)
    dead: list[str] = []
    marker = tmp_path / "marker"
    timer = threading.Thread(target=lambda: (until(marker.exists), stop_me()))
    timer.start()
    command = Command("w@test", ["sh", "-c", f"echo x >> {marker}"], grace_s=0.1)
    assert Fleet([command], lambda incarnation: dead.append(incarnation) or 0).run() == 0
    timer.join()
    assert dead == []
    assert marker.read_text() == "x\n"  # nor is there a successor


def test_handlers_of_signals_are_put_back() -> None:
    before = [signal.getsignal(signum) for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT)]
    assert Fleet([Command("w@test", ["sh", "-c", "exit 78"])], lambda incarnation: 0).run() == os.EX_CONFIG
    assert [signal.getsignal(signum) for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT)] == before


def test_the_undertaker_waits_for_the_broker(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "TAKE_BACK_AGAIN_S", 0.01)
    answers = iter([redis.ConnectionError("gone"), OSError("gone"), 7])

    def take_back(incarnation: str) -> int:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    undertaker = Undertaker(take_back)
    undertaker.start()
    with caplog.at_level(logging.INFO, "busload.fleet"):
        undertaker.bury(Death("w/1", "w ended", "a fresh one starts at once"))
        undertaker.close(DEADLINE_S)
    assert [record.message for record in caplog.records] == [
        "w ended; its messages go back when the broker answers; a fresh one starts at once",
        "the broker is away, trying again: gone",
        "w ended; 7 messages went back to the queues",
    ]


def test_a_broker_that_stays_away_does_not_hold_up_the_end(caplog: pytest.LogCaptureFixture) -> None:
    def take_back(incarnation: str) -> int:
        raise redis.ConnectionError("gone")

    undertaker = Undertaker(take_back)
    undertaker.start()
    undertaker.bury(Death("w/1", "w ended"))
    undertaker.close(timeout_s=0.1)
    assert "what the dead held goes back when their leases have run out" in caplog.text
