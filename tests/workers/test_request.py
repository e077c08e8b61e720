from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import pytest

from busload.workers.request import Partition, differing_options

DIFFERENT = [
    1,
    1.0,
    True,
    "1",
    b"1",
    None,
    float("nan"),
    float("inf"),
    Decimal("1"),
    datetime(2026, 1, 1, tzinfo=UTC),
    "2026-01-01T00:00:00+00:00",
    [1],
    (1,),
    [None],
    [float("nan")],
    {"a": 1},
    {"a": True},
    [["a", 1]],
    "\ud800",
]


def test_values_of_other_types_are_other_partitions() -> None:
    partitions = {Partition.of("task", {"option": value}) for value in DIFFERENT}
    assert len(partitions) == len(DIFFERENT)


@pytest.mark.parametrize("value", DIFFERENT)
def test_equal_values_are_one_partition(value: Any) -> None:
    assert Partition.of("task", {"option": value, "b": 2}) == Partition.of("task", {"b": 2, "option": value})


def test_other_tasks_and_names_are_other_partitions() -> None:
    assert Partition.of("task", {"a": 1}) != Partition.of("other", {"a": 1})
    assert Partition.of("task", {"a": 1}) != Partition.of("task", {"b": 1})


def test_differing_options_are_named() -> None:
    partitions = [Partition.of("task", {"same": 1, "size": size, "mode": "x"}) for size in range(3)]
    assert differing_options(partitions) == ["size"]
    assert differing_options([*partitions, Partition.of("task", {"same": 1, "size": 0, "mode": "y"})]) == [
        "mode",
        "size",
    ]
