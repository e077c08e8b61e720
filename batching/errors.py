"""Every error that busload raises for its users, from one root."""

from __future__ import annotations


class BusloadError(Exception):
    """Root of all errors of this package."""


class ResultCountError(BusloadError):
    """A batch function did not return one result per item, so that no result can be matched to its caller.

    ``expected`` is the number of items, ``got`` the number of results or the name of the type that came
    instead of a list.
    """

    def __init__(self, expected: int, got: int | str) -> None:
        super().__init__(expected, got)
        self.expected = expected
        self.got = got

    def __str__(self) -> str:
        got = f"{self.got} results" if isinstance(self.got, int) else f"a value of type {self.got}"
        return f"expected a list of {self.expected} results, one per item in the same order; got {got}"


class ResultEncodeError(BusloadError):
    """The result of one item cannot be stored: it does not fit the result serializer."""


class BatchAborted(BusloadError):
    """A batch function raised what means nothing for a batch.

    SystemExit and KeyboardInterrupt, which would end the worker, and Celery's Retry, Ignore and Reject, which are
    about one message.
    """
