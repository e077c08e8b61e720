from typing import Any

import pytest

from busload.batching import Failed, ResultCountError, Succeeded, fail_all, match_results


class Array:
    """Like numpy's and torch's."""

    def __init__(self, rows: list[Any]) -> None:
        self.rows = rows

    def tolist(self) -> list[Any]:
        return self.rows


def test_each_item_gets_the_result_at_its_place() -> None:
    assert match_results(["a", "b"], 2) == [Succeeded("a"), Succeeded("b")]
    assert match_results(("a",), 1) == [Succeeded("a")]
    assert match_results(Array([[1.0], [2.0]]), 2) == [Succeeded([1.0]), Succeeded([2.0])]


def test_an_exception_instance_fails_its_own_item() -> None:
    error = ValueError("too long")
    outcomes = match_results(["a", error, None], 3)
    assert outcomes[0] == Succeeded("a")
    assert outcomes[2] == Succeeded(None)
    assert isinstance(outcomes[1], Failed)
    assert outcomes[1].error is error
    assert "ValueError: too long" in outcomes[1].traceback


@pytest.mark.parametrize("results", [[], ["a"], ["a", "b", "c"], ["a"] * 4])
def test_nothing_is_zipped_short(results: list[str]) -> None:
    with pytest.raises(ResultCountError) as caught:
        match_results(results, 2)
    assert (caught.value.expected, caught.value.got) == (2, len(results))
    assert str(caught.value).startswith("expected a list of 2 results")


@pytest.mark.parametrize("results", ["ab", b"ab", {"a": 1, "b": 2}, None, 2, iter(["a", "b"]), {"a", "b"}])
def test_only_a_sequence_can_be_matched(results: object) -> None:
    with pytest.raises(ResultCountError, match=f"got a value of type {type(results).__name__}"):
        match_results(results, 2)


def test_a_scalar_array_is_no_list() -> None:
    class Scalar:
        def tolist(self) -> float:
            return 1.0

    with pytest.raises(ResultCountError, match="got a value of type float"):
        match_results(Scalar(), 1)


def test_a_raising_batch_fails_every_item_with_its_traceback() -> None:
    try:
        raise RuntimeError("boom")
    except RuntimeError as error:
        outcomes = fail_all(error, 3)
    assert len(outcomes) == 3
    assert all(isinstance(outcome, Failed) and "RuntimeError: boom" in outcome.traceback for outcome in outcomes)
