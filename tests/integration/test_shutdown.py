"""A worker that is told to stop loses nothing, does nothing twice, and goes within its grace time."""

from __future__ import annotations

import signal
from typing import Any

import pytest
from celery.result import AsyncResult

from busload.embedded import EmbeddedServer
from tests.integration.conftest import StartWorker
from tests.integration.worker_app import echo
from tests.support import Ledger, is_drained, queued, unacknowledged, until

TIMEOUT_S = 30.0


def outcomes(results: list[AsyncResult[Any]]) -> list[Any]:
    return [result.get(timeout=TIMEOUT_S) for result in results]


def assert_each_ran_once(ledger: Ledger, items: list[str]) -> None:
    assert sorted(item for batch in ledger.batches() for item in batch) == sorted(items)


@pytest.mark.usefixtures("app")
def test_sigterm_with_thirty_buffered_calls(start_worker: StartWorker, server: EmbeddedServer, ledger: Ledger) -> None:
    items = [f"item {number}" for number in range(30)]
    worker = start_worker()
    results = [echo.delay(item) for item in items]
    assert worker.stop() == 0
    assert unacknowledged(server) == 0
    ran = sum(len(batch) for batch in ledger.batches())
    assert ran + queued(server) == 30
    start_worker()
    assert outcomes(results) == items
    assert_each_ran_once(ledger, items)


@pytest.mark.usefixtures("app")
@pytest.mark.parametrize("signals", [1, 2])
def test_sigterm_finishes_the_running_batch_and_hands_the_rest_back(
    start_worker: StartWorker, server: EmbeddedServer, ledger: Ledger, signals: int
) -> None:
    running = echo.delay("running", nap_s=1.0)
    waiting = [echo.delay(f"waiting {number}") for number in range(40)]
    worker = start_worker()
    until(lambda: ledger.times_run("running") == 1)
    assert unacknowledged(server) == 41
    for _ in range(signals):
        worker.send(signal.SIGTERM)
    assert worker.process.wait(TIMEOUT_S) == 0
    assert running.state == "SUCCESS"
    assert (queued(server), unacknowledged(server)) == (40, 0)
    start_worker()
    assert outcomes(waiting) == [f"waiting {number}" for number in range(40)]
    assert_each_ran_once(ledger, ["running", *(f"waiting {number}" for number in range(40))])


@pytest.mark.usefixtures("app")
def test_calls_that_were_handed_back_keep_their_order(
    start_worker: StartWorker, server: EmbeddedServer, ledger: Ledger
) -> None:
    echo.delay("running", nap_s=1.0)
    for number in range(40):
        echo.delay(f"{number:02}")
    worker = start_worker()
    until(lambda: ledger.times_run("running") == 1)
    assert unacknowledged(server) == 41
    worker.stop()
    for number in range(40, 50):
        echo.delay(f"{number:02}")
    start_worker()
    until(lambda: is_drained(server))
    assert ledger.batches()[-1] == [f"{number:02}" for number in range(50)]


@pytest.mark.usefixtures("app")
def test_sigquit_hands_the_running_batch_back_at_once(
    start_worker: StartWorker, server: EmbeddedServer, ledger: Ledger
) -> None:
    stuck = echo.delay("stuck", nap_s=600.0)
    waiting = echo.delay("waiting")
    worker = start_worker()
    until(lambda: ledger.times_run("stuck") == 1)
    assert unacknowledged(server) == 2
    worker.stop(signal.SIGQUIT)
    assert (queued(server), unacknowledged(server)) == (2, 0)
    assert stuck.state == waiting.state == "PENDING"


@pytest.mark.usefixtures("app")
def test_sigquit_cuts_the_grace_of_a_sigterm_short(
    start_worker: StartWorker, server: EmbeddedServer, ledger: Ledger
) -> None:
    worker = start_worker(settings={"busload_shutdown_grace_s": 600})
    echo.delay("stuck", nap_s=600.0)
    until(lambda: ledger.times_run("stuck") == 1)
    worker.send(signal.SIGTERM)
    worker.wait_for("Warm shutdown")
    worker.stop(signal.SIGQUIT)
    assert (queued(server), unacknowledged(server)) == (1, 0)


@pytest.mark.usefixtures("app")
def test_a_soft_shutdown_lets_the_running_batch_finish(
    start_worker: StartWorker, server: EmbeddedServer, ledger: Ledger
) -> None:
    worker = start_worker(settings={"worker_soft_shutdown_timeout": 2.0})
    running = echo.delay("running", nap_s=0.7)
    until(lambda: ledger.times_run("running") == 1)
    worker.stop(signal.SIGQUIT)
    assert running.state == "SUCCESS"
    assert is_drained(server)


@pytest.mark.usefixtures("app")
def test_a_batch_longer_than_the_grace_is_handed_back(
    start_worker: StartWorker, server: EmbeddedServer, ledger: Ledger
) -> None:
    worker = start_worker(settings={"busload_shutdown_grace_s": 0.5})
    stuck = echo.delay("stuck", nap_s=600.0)
    until(lambda: ledger.times_run("stuck") == 1)
    assert worker.stop() == 0
    assert (queued(server), unacknowledged(server)) == (1, 0)
    assert stuck.state == "PENDING"


@pytest.mark.usefixtures("app", "server")
def test_an_idle_worker_stops(start_worker: StartWorker) -> None:
    assert start_worker().stop() == 0


def test_a_worker_whose_server_is_gone_stops(start_worker: StartWorker, tmp_path: Any) -> None:
    with EmbeddedServer() as lost:
        worker = start_worker(
            settings={"broker_url": lost.url, "result_backend": lost.url, "busload_shutdown_grace_s": 1.0}
        )
        lost.kill()
        worker.wait_for("onnection to broker lost")
        assert worker.stop() is not None
