"""The Flask example in a process of its own: its shared task would join every Celery application in this one."""

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("flask")


def test_its_own_tests_pass() -> None:
    tested = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "flask_app/tests.py"],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert tested.returncode == 0, tested.stdout
    assert "3 passed" in tested.stdout
