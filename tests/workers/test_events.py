"""What monitors are shown of results."""

from __future__ import annotations

from typing import Any

import pytest
from celery.utils.saferepr import saferepr

from busload.workers.events import preview


@pytest.mark.parametrize("value", ["text", 1, 1.5, None, True, [], [1, 2], {"a": [1]}, b"x", [["a"] * 30] * 30])
def test_a_preview_is_what_celery_shows(value: Any) -> None:
    assert preview(value, 128) == saferepr(value, 128)


def test_a_long_vector_is_cut() -> None:
    shown = preview([0.123456789] * 384, 128)
    assert shown.startswith("[0.123456789, 0.123456789")
    assert shown.endswith(", ...]")
    assert len(shown) <= 128


def test_an_object_of_the_users_is_never_shown_in_full() -> None:
    class Huge:
        def __repr__(self) -> str:
            return "x" * 10_000

    assert len(preview([1.0] * 15 + [Huge()] * 5, 128)) < 200
