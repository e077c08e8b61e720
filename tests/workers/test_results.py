"""Results as stored agree with what Celery's backend stores of the same value."""

from __future__ import annotations

import math
from typing import Any

import pytest
from celery import Celery
from hypothesis import given
from hypothesis import strategies as st

from busload import BatchTask, configure
from busload.batching import Failed, Succeeded
from busload.workers.request import Call
from busload.workers.results import ResultEncoder, is_plain_json

app = configure(Celery("results", broker="memory://", backend="redis://127.0.0.1:1/0", set_as_current=False))


@app.task(base=BatchTask, name="results.echo", shared=False)
def echo(items: list[Any], /) -> list[Any]:
    return items


def call(**fields: Any) -> Call:
    return Call("the-id", echo, [1], {}, lambda: pytest.fail("no request is needed"), **fields)


def stored(value: Any, **fields: Any) -> dict[str, Any]:
    """Return what a reader with stock Celery gets to see."""
    (write,) = ResultEncoder(app.backend).encode([(call(**fields), Succeeded(value))])
    assert write.meta is not None
    assert write.key == "celery-task-meta-the-id"
    return dict(app.backend.decode(write.meta))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(), inner, max_size=5),
    max_leaves=20,
)


@given(JSON)
def test_every_json_value_is_read_as_it_was(value: Any) -> None:
    if is_plain_json(value):
        assert stored(value)["result"] == value


def test_the_record_has_the_fields_of_celerys_own() -> None:
    record = stored([0.5, -1e-9], group="g", parent_id="p")
    own = app.backend._get_result_meta([0.5, -1e-9], "SUCCESS", None, None)
    assert set(own) | {"group_id", "parent_id", "task_id"} == set(record)
    assert {**record, "date_done": None} == {
        "status": "SUCCESS",
        "result": [0.5, -1e-9],
        "traceback": None,
        "children": [],
        "date_done": None,
        "group_id": "g",
        "parent_id": "p",
        "task_id": "the-id",
    }


@pytest.mark.parametrize(
    "value",
    [math.nan, [1.0, math.inf], b"x", {1: "x"}, {1, 2}, object(), [b"x"], (1, object()), 1 + 2j, {"a": math.nan}],
)
def test_what_encoders_disagree_about_is_not_plain(value: Any) -> None:
    assert not is_plain_json(value)


def test_a_subclass_is_not_plain() -> None:
    class Text(str):
        __slots__ = ()

    assert not is_plain_json(Text("x"))
    assert not is_plain_json([1.0, True, Text("x")])


def test_an_ignored_result_is_not_stored() -> None:
    (write,) = ResultEncoder(app.backend).encode([(call(ignore_result=True), Succeeded("x"))])
    assert write.meta is None
    (write,) = ResultEncoder(app.backend).encode([(call(ignore_result=True), Failed(ValueError("x"), ""))])
    assert write.meta is None
