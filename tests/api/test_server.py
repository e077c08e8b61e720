"""The API as it runs: granian in a process of its own."""

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

import busload.api
from busload.api import Settings
from busload.api.server import serve
from busload.embedded import EmbeddedServer
from busload.tasks.leases import LeaseBook
from tests.support import until

SCRIPT = """
import sys
from pathlib import Path
from pydantic import SecretStr
from busload.api import Settings
from busload.api.server import serve

if __name__ == "__main__":
    url, port, uds = sys.argv[1:]
    serve(Settings(broker_url=SecretStr(url)), "127.0.0.1", int(port), 2, uds=Path(uds) if uds else None)
"""


@contextmanager
def serving(server: EmbeddedServer, port: int, uds: str = "") -> Iterator[subprocess.Popen[str]]:
    source = str(Path(busload.api.__file__).parents[2])
    with subprocess.Popen(
        [sys.executable, "-c", SCRIPT, server.url, str(port), uds],
        env={**os.environ, "PYTHONPATH": source},
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.terminate()


@pytest.fixture
def port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def ask(port: int, method: str, path: str, body: object = None) -> tuple[int, bytes]:
    """Make one request; until the server listens, try again, bounded by the test's own timeout."""
    while True:
        with closing(http.client.HTTPConnection("127.0.0.1", port)) as connection:
            try:
                connection.request(method, path, body, {"Content-Type": "application/json"})  # type: ignore[arg-type]
            except ConnectionRefusedError:
                continue
            answer = connection.getresponse()
            return answer.status, answer.read()


@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGINT])
def test_it_says_where_it_is_answers_and_stops_cleanly(
    server: EmbeddedServer, store: object, port: int, stop: signal.Signals
) -> None:
    with serving(server, port) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == f"busload api on http://127.0.0.1:{port}\n"
        assert ask(port, "GET", "/healthz") == (200, b'{"status":"ok"}\n')
        status, body = ask(port, "POST", "/v1/tasks/embed", b'{"input": "a"}')
        assert status == 202
        for _ in range(10):  # of either process
            assert ask(port, "GET", json.loads(body)["href"])[0] == 200
        process.send_signal(stop)
        assert process.wait() == 0
        assert process.stdout.read() == ""


def test_bodies_too_large_are_413_also_when_chunked(server: EmbeddedServer, store: object, port: int) -> None:
    with serving(server, port):
        for body in (b"x" * (4 << 20), iter([b'{"input": "a"}', b" " * (4 << 20)])):
            status, answer = ask(port, "POST", "/v1/tasks/embed", body)
            assert (status, json.loads(answer)["error"]["code"]) == (413, "too_large")
        assert ask(port, "POST", "/v1/tasks/embed", iter([b'{"input"', b': "a"}']))[0] == 202


def test_a_client_that_sends_slowly_holds_up_no_other(server: EmbeddedServer, store: object, port: int) -> None:
    head = b"POST /v1/tasks/embed HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n{"
    with serving(server, port):
        assert ask(port, "GET", "/healthz")[0] == 200
        # More than there are processes: at least one of them has two.
        slow = [socket.create_connection(("127.0.0.1", port)) for _ in range(3)]
        for connection in slow:
            connection.sendall(head)
        for _ in range(20):
            assert ask(port, "GET", "/healthz")[0] == 200
        for connection in slow:
            connection.close()


def test_a_unix_socket(server: EmbeddedServer, store: object, tmp_path: Path) -> None:
    path = tmp_path / "api.sock"
    with serving(server, 0, str(path)) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == f"busload api on unix:{path}\n"
        with socket.socket(socket.AF_UNIX) as connection:
            while connection.connect_ex(str(path)):
                pass
            connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            assert connection.makefile("rb").read().endswith(b'{"status":"ok"}\n')
        process.terminate()
        assert process.wait() == 0


def test_a_port_in_use_is_an_error(port: int) -> None:
    with socket.create_server(("127.0.0.1", port)), pytest.raises(OSError, match="in use"):
        serve(Settings(), "127.0.0.1", port, 1)


def test_what_dead_workers_held_is_given_back_where_only_the_api_is_left(server: EmbeddedServer, port: int) -> None:
    with server.client() as client:
        client.hset("busload:1:unacked:dead", mapping={"2": "5:queuesecond", "1": "5:queuefirst"})
        client.zadd("busload:1:leases", {"dead": 1})
        with serving(server, port):
            assert ask(port, "GET", "/healthz")[0] == 200
            until(lambda: client.lrange("queue", 0, -1) == [b"second", b"first"])
        assert LeaseBook(client, "").holders() == []
