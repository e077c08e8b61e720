"""What became of one item: a value or an error, never an exception in flight."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from .errors import ResultCountError


@dataclass(slots=True)
class Succeeded:
    """The item has its result."""

    value: Any


@dataclass(frozen=True, slots=True)
class Failed:
    """The item failed; ``traceback`` is the text that is stored beside the error."""

    error: BaseException
    traceback: str
    origin: TracebackType | None = None
    """Where the error was raised: raising it again for another item starts from here."""

    @classmethod
    def from_error(cls, error: BaseException) -> Failed:
        return cls(error, "".join(traceback.format_exception(error)), error.__traceback__)


Outcome = Succeeded | Failed

_PLAIN = frozenset((str, int, float, bool, list, dict, tuple, bytes, type(None)))


def match_results(results: object, expected: int) -> list[Outcome]:
    """Give each of ``expected`` items its own outcome, in order.

    ``results`` is what a batch function returned: a list or tuple with one element per item, or an array
    that turns into one through ``tolist()``. An element that is an exception instance fails its own item.

    Raises ResultCountError where results cannot be matched to items one to one.
    """
    results = _plain(results)
    if not isinstance(results, Sequence) or isinstance(results, (str, bytes, bytearray, memoryview)):
        raise ResultCountError(expected, type(results).__name__)
    if len(results) != expected:
        raise ResultCountError(expected, len(results))
    return [
        Failed.from_error(result) if isinstance(result, BaseException) else Succeeded(_plain(result))
        for result in results
    ]


def _plain(result: Any) -> Any:
    """Turn an array, tensor or array scalar into plain numbers."""
    if type(result) in _PLAIN:  # looking for what is not there takes longest
        return result
    return result.tolist() if hasattr(result, "tolist") else result


def fail_all(error: BaseException, count: int) -> list[Outcome]:
    """One shared failure for each of ``count`` items of a batch that raised ``error``."""
    failed = Failed.from_error(error)
    return [failed] * count
