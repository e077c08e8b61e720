"""``busload worker`` as its users run it: real processes on a real server, killed and stopped in every way."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from click.testing import CliRunner

from busload.cli import main
from busload.embedded import EmbeddedServer
from busload.tasks.leases import LeaseBook
from busload.testing import reconnect
from busload.workers.leases import Leases
from tests.integration import worker_app
from tests.integration.worker_app import echo
from tests.support import (
    DEADLINE_S,
    ROOT,
    Ledger,
    children_of,
    environment,
    is_drained,
    is_running,
    queued,
    unacknowledged,
    until,
)

APP = "tests.integration.worker_app"
QUICK = ("-o", "--without-mingle", "-o", "--without-gossip", "-n", "w@test")


class BusloadWorker:
    """A running ``busload worker``."""

    def __init__(self, process: subprocess.Popen[bytes], log_path: Path) -> None:
        self.process = process
        self._log_path = log_path

    @property
    def log(self) -> str:
        return self._log_path.read_text(errors="replace")

    def pids(self) -> list[int]:
        """Return those of all worker processes that it has started so far."""
        return [int(pid) for pid in re.findall(r"started \S+ \(pid (\d+)\)", self.log)]

    def wait_for(self, text: str, times: int = 1) -> None:
        until(lambda: self.log.count(text) >= times or self.process.poll() is not None)
        assert self.log.count(text) >= times, self.log

    def send(self, signum: signal.Signals) -> None:
        self.process.send_signal(signum)

    def wait(self) -> int:
        return self.process.wait(DEADLINE_S)


Start = Callable[..., BusloadWorker]


@pytest.fixture
def start(server: EmbeddedServer, tmp_path: Path) -> Iterator[Start]:
    """Start ``busload worker`` with options; it ends with the test, and so does all that it started."""
    started: list[subprocess.Popen[bytes]] = []

    def run(*options: str, app: str = APP, **settings: Any) -> BusloadWorker:
        log = tmp_path / f"busload-worker-{len(started)}.log"
        with log.open("w") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "busload.cli", "worker", "-A", app, *QUICK, *options],
                env=environment(server, WORKER_APP_SETTINGS=json.dumps(settings)),
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                # As in a terminal: what a script starts in the background has SIGINT ignored, and so had this.
                preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
            )
        started.append(process)
        return BusloadWorker(process, log)

    yield run
    for process in started:
        if process.poll() is None:
            process.kill()
            process.wait(DEADLINE_S)


def test_what_a_killed_process_held_is_done_by_the_next(start: Start, app: Celery, ledger: Ledger) -> None:
    worker = start(app="tests.long_lease_app")
    worker.wait_for(" ready.")
    results = [echo.delay(number, nap_s=0.5) for number in range(40)]
    until(ledger.batches)
    (before,) = {holder.incarnation for holder in LeaseBook.of(app).holders()}
    os.kill(worker.pids()[0], signal.SIGKILL)
    assert [result.get(timeout=DEADLINE_S) for result in results] == list(range(40))
    said = re.search(
        r"w@test \(pid (\d+)\) ended with exit code 137 \(SIGKILL\); (\d+) messages? went back to the queues; "
        r"a fresh one starts at once",
        worker.log,
    )
    assert said is not None, worker.log
    first, second = worker.pids()
    assert int(said[1]) == first != second
    assert 1 <= int(said[2]) <= 40
    (after,) = {holder.incarnation for holder in LeaseBook.of(app).holders()}
    assert before != after


def test_the_others_go_on_when_one_of_them_is_killed(start: Start, app: Celery, ledger: Ledger) -> None:
    worker = start("--processes", "2", app="tests.long_lease_app", busload_shutdown_grace_s=0)
    worker.wait_for(" ready.", times=2)
    # Whoever gets the first is busy for good, until it is killed.
    echo.delay("stuck", nap_s=3600.0)
    until(lambda: ledger.times_run("stuck") == 1)
    results = [echo.delay(number) for number in range(100)]
    assert [result.get(timeout=DEADLINE_S) for result in results] == list(range(100))
    (holder,) = (holder for holder in LeaseBook.of(app).holders() if holder.messages)
    node = holder.incarnation.rpartition("/")[0]
    assert node in ("w-1@test", "w-2@test")
    os.kill(worker.pids()[int(node[2]) - 1], signal.SIGKILL)
    worker.wait_for("; 1 message went back to the queues")
    until(lambda: ledger.times_run("stuck") == 2)


def test_a_killed_watchdog_is_a_death_like_any_other(start: Start, app: Celery) -> None:
    worker = start(app="tests.long_lease_app")
    worker.wait_for(" ready.")
    (pid,) = worker.pids()
    watchdog = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(watchdog, signal.SIGKILL)
    worker.wait_for("w@test ready.", times=2)
    assert not is_running(pid)
    assert echo.delay("again").get(timeout=DEADLINE_S) == "again"


def test_refused_settings_end_it_all(start: Start) -> None:
    worker = start("--processes", "2", worker_prefetch_multiplier=0)
    assert worker.wait() == os.EX_CONFIG
    assert "busload: worker_prefetch_multiplier=0 would let this worker hoard every message" in worker.log
    assert "refused its settings (exit code 78)" in worker.log
    assert len(worker.pids()) == 2
    assert not any(map(is_running, worker.pids()))


@pytest.mark.usefixtures("app")
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_lets_the_running_batch_finish(
    start: Start, server: EmbeddedServer, ledger: Ledger, signum: signal.Signals
) -> None:
    worker = start("--processes", "2")
    worker.wait_for(" ready.", times=2)
    result = echo.delay("running", nap_s=1.0)
    until(lambda: ledger.times_run("running") == 1)
    worker.send(signum)
    worker.send(signal.SIGTERM)  # changes nothing
    assert worker.wait() == 0
    assert result.state == "SUCCESS"
    assert is_drained(server)
    assert not any(map(is_running, worker.pids()))
    assert len(worker.pids()) == 2


@pytest.mark.usefixtures("app")
@pytest.mark.parametrize("signums", [[signal.SIGINT, signal.SIGINT], [signal.SIGQUIT]])
def test_a_cold_stop_hands_the_running_batch_back(
    start: Start, server: EmbeddedServer, ledger: Ledger, signums: list[signal.Signals]
) -> None:
    worker = start(busload_shutdown_grace_s=3600)
    worker.wait_for(" ready.")
    echo.delay("running", nap_s=3600.0)
    until(lambda: ledger.times_run("running") == 1)
    for times, signum in enumerate(signums):
        if times:
            worker.wait_for("stopping w@test")
        worker.send(signum)
    assert worker.wait() == 0
    assert (queued(server), unacknowledged(server)) == (1, 0)


@pytest.mark.usefixtures("app")
def test_what_cannot_stop_in_time_is_killed_and_its_calls_go_back(
    start: Start, server: EmbeddedServer, ledger: Ledger
) -> None:
    worker = start(app="tests.long_lease_app", busload_shutdown_grace_s=-4.5)  # and 5 s beyond it
    worker.wait_for(" ready.")
    echo.delay("held", nap_s=3600.0)
    until(lambda: ledger.times_run("held") == 1)
    (pid,) = worker.pids()
    os.kill(pid, signal.SIGSTOP)
    # The watchdog sends SIGCONT when it begins; this stops it again for good.
    worker.send(signal.SIGTERM)
    worker.wait_for("stopping w@test")
    until(lambda: not is_running(pid) or os.kill(pid, signal.SIGSTOP))
    assert worker.wait() == 0
    assert (queued(server), unacknowledged(server)) == (1, 0)


def test_nothing_outlives_a_killed_busload_worker(start: Start) -> None:
    worker = start("--processes", "2")
    worker.wait_for(" ready.", times=2)
    children = children_of(worker.process.pid)
    assert len(children) >= 4  # two processes, each under its watchdog
    worker.send(signal.SIGKILL)
    until(lambda: not any(map(is_running, children)))


def test_it_gives_up_when_it_was_told_to(start: Start) -> None:
    worker = start("--give-up-after", "2", "-o", "--no-such-option")
    assert worker.wait() == 2
    assert len(worker.pids()) == 2
    assert "death 2 in a row, all stop" in worker.log


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "-A says whose application it is"),
        (["-A", "no.such.module"], "cannot load the application no.such.module: No module named 'no'"),
        (["-A", APP, "--gpus", "0,1", "--processes", "2"], "--gpus says how many processes there are"),
        (["-A", APP, "--gpus", "0,,1"], "'0,,1' is no list of different names"),
        (["-A", APP, "--gpus", "0,0"], "'0,0' is no list of different names"),
        (["eject"], "-A says whose application it is"),
    ],
)
def test_mistakes_are_named(options: list[str], message: str) -> None:
    run = CliRunner().invoke(main, ["worker", *options])
    assert run.exit_code in (1, 2)
    assert message in run.output


# -- eject ---------------------------------------------------------------------------------------------


def hold(server: EmbeddedServer, incarnation: str, lists: list[str], texts: list[str], prefix: str = "") -> Leases:
    """Hold messages as a worker does, put on the lists in turn, the first as the oldest."""
    client = server.client()
    keys = [f"{prefix}{name}" for name in lists]
    for number, text in enumerate(texts):
        client.lpush(keys[number % len(keys)], text)
    leases = Leases(client, prefix, incarnation)
    _, _, messages = leases.move(keys, at_most=len(texts), seen_drained=0, full_depth=1)
    assert len(messages) == len(texts)
    return leases


def eject(*options: str) -> Any:
    return CliRunner().invoke(main, ["worker", "eject", "-A", APP, *options])


@pytest.mark.usefixtures("app")
def test_eject_refuses_while_a_lease_is_alive(server: EmbeddedServer) -> None:
    hold(server, "w@test/1", ["celery"], ["a", "b", "c"])
    refused = eject()
    assert refused.exit_code == 1
    assert re.search(r"w@test/1\s*│\s*3\s*│\s*1[45] s", refused.stdout), refused.stdout
    assert "Nothing went back" in refused.stderr
    (alive,) = json.loads(eject("--json").stdout)["alive"]
    assert (alive["holder"], alive["messages"]) == ("w@test/1", 3)
    assert 0 < alive["ends_in_s"] <= 15
    assert (queued(server), unacknowledged(server)) == (0, 3)


@pytest.mark.usefixtures("app")
def test_eject_takes_from_the_living_by_force_alone(server: EmbeddedServer) -> None:
    hold(server, "w@test/1", ["celery", "celery\x06\x163"], ["a", "b", "c"])
    hold(server, "w@test/2", ["other"], ["d"])
    forced = eject("--force", "--json")
    assert forced.exit_code == 0, forced.output
    assert json.loads(forced.stdout) == {
        "messages": 4,
        "ejected": [
            {"holder": "w@test/1", "list": "celery", "messages": 2},
            {"holder": "w@test/1", "list": "celery\x06\x163", "messages": 1},
            {"holder": "w@test/2", "list": "other", "messages": 1},
        ],
    }
    with server.client() as client:
        assert client.lrange("celery", 0, -1) == [b"c", b"a"]
        assert client.lrange("celery\x06\x163", 0, -1) == [b"b"]
        assert client.lrange("other", 0, -1) == [b"d"]
    assert unacknowledged(server) == 0
    assert eject().stdout == "No worker of busload holds a message.\n"


def test_eject_takes_from_the_dead(app: Celery, server: EmbeddedServer) -> None:
    ended = hold(server, "w@test/1", ["celery"], ["a"])
    lost = hold(server, "w@test/2", ["celery"], ["b"])
    with server.client() as client:
        client.zadd(ended.keys.leases, {"w@test/1": 1})
        client.zrem(lost.keys.leases, "w@test/2")
    given = eject()
    assert given.exit_code == 0, given.output
    assert "2 messages went back" in given.stdout
    assert (queued(server), unacknowledged(server)) == (2, 0)
    assert LeaseBook.of(app).holders() == []


def test_eject_knows_the_prefix_of_the_application(server: EmbeddedServer) -> None:
    prefix = {"broker_transport_options": {"global_keyprefix": "te[a]m:"}}
    reconnect(worker_app.app, {"broker_url": server.url, "result_backend": server.url, **prefix})
    try:
        hold(server, "w@test/1", ["celery"], ["a"], prefix="te[a]m:")
        hold(server, "w@test/2", ["celery"], ["a"])
        given = json.loads(eject("--force", "--json").stdout)
        assert given["ejected"] == [{"holder": "w@test/1", "list": "te[a]m:celery", "messages": 1}]
        assert queued(server, "te[a]m:celery") == 1
    finally:
        reconnect(worker_app.app, {"broker_transport_options": {}})


def test_eject_says_that_the_broker_is_away(app: Celery, tmp_path: Path) -> None:
    reconnect(app, {"broker_url": f"redis+socket://{tmp_path}/none.sock", "broker_connection_timeout": 0.2})
    try:
        run = eject()
    finally:
        reconnect(app, {"broker_connection_timeout": 4})
    assert run.exit_code == 1
    assert "the broker is away" in run.stderr


def test_eject_has_no_say_over_other_brokers(app: Celery) -> None:
    reconnect(app, {"broker_url": "memory://"})
    run = eject()
    assert run.exit_code == 1
    assert "the broker is not Redis" in run.stderr
