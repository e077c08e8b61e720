"""What callers get from a real worker on a real server."""

from __future__ import annotations

import json
import uuid
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from celery import Celery, chain, chord, group
from celery.result import AsyncResult

from busload import ResultCountError
from busload.embedded import EmbeddedServer
from tests.integration.conftest import StartWorker
from tests.integration.worker_app import (
    boom,
    brief,
    double,
    echo,
    note_error,
    odd_results,
    plain_boom,
    plain_calls_batched,
    plain_echo,
    plain_join,
    quits,
    repeat,
    short,
    tracked,
)
from tests.support import Ledger, is_drained, queued, until

TIMEOUT_S = 30.0


def outcome(result: AsyncResult[Any]) -> Any:
    return result.get(timeout=TIMEOUT_S, propagate=False)


def stored(server: EmbeddedServer, task_id: str) -> tuple[dict[str, Any], int]:
    """Return what is stored for a task, and its remaining lifetime in seconds."""
    with server.client() as client:
        key = f"celery-task-meta-{task_id}"
        return json.loads(client.get(key)), int(client.ttl(key))


@pytest.mark.usefixtures("app")
@pytest.mark.parametrize("count", [1, 64, 200])
def test_every_call_gets_its_own_result(start_worker: StartWorker, server: EmbeddedServer, count: int) -> None:
    start_worker(settings={"result_extended": True})
    results = [double.delay(number) for number in range(count)]
    assert [outcome(result) for result in results] == [number * 2 for number in range(count)]
    for number, result in enumerate(results):
        meta, _ = stored(server, result.id)
        assert (meta["status"], meta["args"], meta["worker"], meta["task_id"]) == (
            "SUCCESS",
            [number],
            "w1@test",
            result.id,
        )
        assert meta["date_done"]
    until(lambda: is_drained(server))


@pytest.mark.usefixtures("app")
def test_a_backlog_rides_in_full_batches(start_worker: StartWorker, server: EmbeddedServer, ledger: Ledger) -> None:
    for number in range(2000):
        echo.delay(number)
    start_worker()
    until(lambda: is_drained(server))
    sizes = [len(batch) for batch in ledger.batches()]
    assert sum(sizes) == 2000
    assert sizes.count(64) >= 0.9 * len(sizes), sizes


@pytest.mark.usefixtures("app")
def test_concurrent_callers_never_get_each_others_results(start_worker: StartWorker) -> None:
    start_worker()

    def ask(client: int) -> list[bool]:
        results = [(number, double.delay(number)) for number in range(client * 100, client * 100 + 20)]
        return [outcome(result) == number * 2 for number, result in results]

    with ThreadPoolExecutor(32) as clients:
        answers = [right for client in clients.map(ask, range(32)) for right in client]
    assert answers == [True] * 640


@pytest.mark.usefixtures("app")
@pytest.mark.parametrize("count", [3, 64])
def test_a_raising_batch_fails_every_call_with_its_traceback(
    start_worker: StartWorker, server: EmbeddedServer, count: int
) -> None:
    start_worker()
    results = [boom.delay(f"item {number}") for number in range(count)]
    for result in results:
        error = outcome(result)
        assert isinstance(error, RuntimeError)
        assert str(error) == "the model broke"
        assert result.state == "FAILURE"
        assert "in boom" in result.traceback
    until(lambda: is_drained(server))


@pytest.mark.usefixtures("app")
def test_an_exception_in_the_results_fails_its_own_call(start_worker: StartWorker) -> None:
    start_worker()
    results = [double.delay(number) for number in (1, -2, 3)]
    assert [str(outcome(result)) for result in results] == ["2", "-2 is negative", "6"]
    assert [result.state for result in results] == ["SUCCESS", "FAILURE", "SUCCESS"]


@pytest.mark.usefixtures("app")
def test_a_missing_result_fails_the_batch(start_worker: StartWorker) -> None:
    start_worker()
    errors = [outcome(result) for result in [short.delay("a"), short.delay("b")]]
    assert all(isinstance(error, ResultCountError) for error in errors)
    assert (errors[0].expected, errors[0].got) == (2, 1)


@pytest.mark.usefixtures("app")
def test_a_batch_that_raises_system_exit_fails_and_the_worker_lives(start_worker: StartWorker) -> None:
    start_worker()
    assert "SystemExit(3)" in str(outcome(quits.delay("a")))
    assert outcome(echo.delay("still here")) == "still here"


@pytest.mark.usefixtures("app")
def test_a_result_that_cannot_be_stored_fails_its_own_call(start_worker: StartWorker) -> None:
    start_worker()
    good, bad = odd_results.delay("number"), odd_results.delay("object")
    assert outcome(good) == 1.5
    assert "cannot be stored" in str(outcome(bad))
    assert bad.state == "FAILURE"


@pytest.mark.usefixtures("app")
def test_only_equal_options_share_a_batch(start_worker: StartWorker, ledger: Ledger) -> None:
    for number in range(20):
        echo.delay(f"{number % 2}", tag="even " if number % 2 == 0 else "odd ")
    start_worker()
    until(lambda: len(ledger.batches()) == 2)
    assert sorted(ledger.batches()) == [["0"] * 10, ["1"] * 10]


@pytest.mark.usefixtures("app")
def test_too_many_option_sets_are_warned_of_by_name(start_worker: StartWorker, server: EmbeddedServer) -> None:
    for number in range(40):
        echo.delay("a", tag=f"{number}")
    worker = start_worker()
    until(lambda: is_drained(server))
    assert worker.log.count("more than 32 different values of tag wait at once") == 1


@pytest.mark.usefixtures("app")
def test_per_item_options_reach_the_function_as_lists(start_worker: StartWorker, ledger: Ledger) -> None:
    results = [repeat.delay("a"), repeat.delay("b", times=3), repeat.delay("c", times=2, end="!")]
    start_worker()
    assert [outcome(result) for result in results] == ["a.", "bbb.", "cc!"]
    assert sorted(ledger.batches()) == [["a", "b"], ["c"]]


@pytest.mark.usefixtures("server")
def test_a_wrong_call_from_a_foreign_producer_fails_alone(
    app: Celery, start_worker: StartWorker, ledger: Ledger
) -> None:
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        ((1,), {}),
        ((), {}),
        ((1, 2), {}),
        ((1,), {"speed": 9}),
        (("one",), {}),
        ((None,), {}),
        ((2,), {}),
    ]
    results = [app.send_task("double", args, kwargs) for args, kwargs in calls]
    start_worker()
    outcomes = [outcome(result) for result in results]
    assert [outcomes[0], outcomes[-1]] == [2, 4]
    assert all(isinstance(error, TypeError) for error in outcomes[1:-1]), outcomes
    assert ledger.batches() == [[1, 2]]


@pytest.mark.usefixtures("app")
def test_eager_direct_and_sent_calls_agree(start_worker: StartWorker, app: Celery) -> None:
    start_worker()
    sent = [outcome(repeat.delay("a", times=2)), outcome(repeat.apply_async(("b",), {"end": "!"}))]
    direct = [repeat.apply(("a",), {"times": 2}).get(), repeat.apply(("b",), {"end": "!"}).get()]
    assert sent == direct == ["aa.", "b!"]


@pytest.mark.usefixtures("app")
def test_a_direct_call_inside_a_worker_goes_through_the_runner(start_worker: StartWorker) -> None:
    start_worker()
    assert outcome(plain_calls_batched.delay("x")) == ["direct x", "x"]


@pytest.mark.usefixtures("app")
@pytest.mark.parametrize("settings", [{}, {"result_extended": True}])
def test_results_are_stored_in_celerys_own_shape(
    start_worker: StartWorker, server: EmbeddedServer, settings: dict[str, Any]
) -> None:
    start_worker(settings={**settings, "result_failure_expires": 500})
    pairs = [
        (plain_echo.delay("a"), echo.delay("a")),
        (plain_boom.delay("a"), boom.delay("a")),
    ]
    for plain, batched in pairs:
        outcome(plain), outcome(batched)
        (expected, expected_ttl), (meta, ttl) = stored(server, plain.id), stored(server, batched.id)
        assert meta.keys() == expected.keys()
        different = {name for name in meta if meta[name] != expected[name]}
        assert different <= {"task_id", "date_done", "traceback", "name"}
        assert type(meta["traceback"]) is type(expected["traceback"])
        assert abs(ttl - expected_ttl) <= 2


@pytest.mark.usefixtures("app")
def test_results_live_as_long_as_their_task_says(start_worker: StartWorker, server: EmbeddedServer) -> None:
    start_worker()
    usual, short_lived, traced = echo.delay("a"), brief.delay("a"), brief.apply_async(("a",), link=plain_echo.s())
    for result in (usual, short_lived, traced):
        outcome(result)
    assert 3590 < stored(server, usual.id)[1] <= 3600
    assert 70 < stored(server, short_lived.id)[1] <= 77
    assert 70 < until(lambda: stored(server, traced.id)[1] <= 77 and stored(server, traced.id)[1]) <= 77


@pytest.mark.usefixtures("app")
def test_an_ignored_result_is_not_stored(start_worker: StartWorker, server: EmbeddedServer, ledger: Ledger) -> None:
    start_worker()
    result = echo.apply_async(("a",), ignore_result=True)
    until(lambda: ledger.times_run("a") == 1 and is_drained(server))
    with server.client() as client:
        assert client.get(f"celery-task-meta-{result.id}") is None


@pytest.mark.usefixtures("app")
def test_a_started_batch_can_be_tracked(start_worker: StartWorker) -> None:
    start_worker()
    result = tracked.delay("a", nap_s=0.5)
    until(lambda: result.state == "STARTED")
    assert outcome(result) == "a"


@pytest.mark.usefixtures("app")
def test_callbacks_chains_and_chords_work_as_with_plain_tasks(start_worker: StartWorker, ledger: Ledger) -> None:
    start_worker()
    assert outcome(chain(echo.s("a"), plain_echo.s(), echo.s(tag="chained ")).apply_async()) == "chained a"
    assert outcome(chord([double.s(number) for number in range(70)])(plain_join.s())) == "+".join(
        str(number * 2) for number in range(70)
    )
    assert group([echo.s("a"), double.s(2)]).apply_async().get(timeout=TIMEOUT_S) == ["a", 4]
    linked = echo.apply_async(("b",), link=echo.s(tag="linked "))
    assert outcome(linked) == "b"
    until(lambda: linked.children and linked.children[0].state == "SUCCESS")
    failed = boom.apply_async(("c",), link_error=note_error.s())
    outcome(failed)
    until(lambda: ledger.times_run(f"error of {failed.id}") == 1)


@pytest.mark.usefixtures("app")
def test_a_failure_fails_the_rest_of_its_chain_and_its_chord(start_worker: StartWorker) -> None:
    start_worker()
    last = chain(boom.s("a"), echo.s()).apply_async()
    assert isinstance(outcome(last), RuntimeError)
    assert isinstance(outcome(last.parent), RuntimeError)
    body = chord([double.s(1), double.s(-1)])(plain_join.s())
    assert "is negative" in str(outcome(body))


@pytest.mark.usefixtures("server")
def test_revoked_and_expired_calls_do_not_run(app: Celery, start_worker: StartWorker, ledger: Ledger) -> None:
    start_worker()
    blocker = echo.delay("blocker", nap_s=2.0)
    until(lambda: ledger.times_run("blocker") == 1)
    kept, revoked = echo.delay("kept"), echo.delay("revoked")
    expired = echo.apply_async(("expired",), expires=0.1)
    app.control.revoke(revoked.id)
    assert outcome(kept) == "kept"
    assert outcome(blocker) == "blocker"
    until(lambda: revoked.state == expired.state == "REVOKED")
    assert ledger.times_run("revoked") == ledger.times_run("expired") == 0


@pytest.mark.usefixtures("app")
def test_a_countdown_is_kept(start_worker: StartWorker, ledger: Ledger) -> None:
    start_worker()
    late = echo.apply_async(("late",), countdown=1.5)
    assert outcome(echo.delay("soon")) == "soon"
    assert outcome(late) == "late"
    assert ledger.batches() == [["soon"], ["late"]]


@pytest.mark.usefixtures("server")
def test_inspect_answers_during_a_long_batch(app: Celery, start_worker: StartWorker, ledger: Ledger) -> None:
    start_worker()
    running = echo.delay("running", nap_s=3.0)
    until(lambda: ledger.times_run("running") == 1)
    waiting = echo.delay("waiting")
    inspect = app.control.inspect(timeout=2.0, limit=1)
    assert inspect.ping() == {"w1@test": {"ok": "pong"}}
    assert [call["id"] for call in inspect.active()["w1@test"]] == [running.id]
    # What waits is still in its queue, for any worker to take.
    assert inspect.reserved()["w1@test"] == []
    assert [outcome(running), outcome(waiting)] == ["running", "waiting"]
    (reply,) = app.control.broadcast("batches", reply=True, timeout=2.0, limit=1)
    assert reply["w1@test"]["echo"] == {**reply["w1@test"]["echo"], "batches": 2, "items": 2, "failed": 0}


def test_a_call_delivered_twice_has_one_outcome(
    app: Celery, start_worker: StartWorker, server: EmbeddedServer, ledger: Ledger
) -> None:
    result = echo.delay("twice")
    with server.client() as client:
        (message,) = client.lrange("celery", 0, -1)
        redelivered = json.loads(message)
        redelivered["headers"]["redelivered"] = True
        redelivered["properties"]["delivery_info"]["redelivered"] = True
        start_worker()
        assert outcome(result) == "twice"
        until(lambda: is_drained(server))
        client.lpush("celery", json.dumps(redelivered))
        until(lambda: is_drained(server))
    assert outcome(echo.delay("after")) == "after"
    assert ledger.times_run("twice") == 1


@pytest.mark.parametrize("missing", ["id", "task", "lang"])
def test_a_damaged_message_stops_nobody(
    start_worker: StartWorker, app: Celery, server: EmbeddedServer, missing: str
) -> None:
    worker = start_worker()
    app.send_task("echo", ("a",), queue="elsewhere")
    with server.client() as client:
        message = json.loads(client.lpop("elsewhere"))
        message["headers"].pop(missing)
        message["properties"]["delivery_tag"] = str(uuid.uuid4())
        client.lpush("celery", json.dumps(message))
    until(lambda: queued(server) == 0)
    assert outcome(echo.delay("after")) == "after"
    assert worker.process.poll() is None
    until(lambda: is_drained(server))
