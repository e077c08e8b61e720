"""Everything that busload's workers hold goes back to the stock lists, for leaving busload or after an accident."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from celery import Celery

from .batching import BusloadError
from .tasks.leases import LIBRARY, Holder, LeaseBook, pairs
from .tasks.scripts import Script

# KEYS: leases, drained, the unacked hash of the incarnation. ARGV: the incarnation, whether also from the living.
# Returns nothing when the lease is alive, else lists and how many messages went back to each.
_EJECT = Script(
    LIBRARY
    + """
local ends = redis.call('ZSCORE', KEYS[1], ARGV[1])
if ARGV[2] == '0' and ends and tonumber(ends) > now_ms() then return false end
local messages, lists, found = {}, {}, {}
for _, held in ipairs(redis.call('HVALS', KEYS[3])) do
    local list = read(held)
    if not messages[list] then lists[#lists + 1] = list end
    messages[list] = (messages[list] or 0) + 1
end
take_back(KEYS[1], KEYS[3], KEYS[2], ARGV[1])
for _, list in ipairs(lists) do
    found[#found + 1] = list
    found[#found + 1] = messages[list]
end
return found
"""
)


@dataclass(frozen=True)
class Ejected:
    """How many messages went from a holder back to a list."""

    holder: str
    list: str
    messages: int


class LeasesAlive(BusloadError):
    """Workers live, or may: ``holders`` tells which."""

    def __init__(self, holders: Sequence[Holder]) -> None:
        super().__init__(f"{len(holders)} leases are alive")
        self.holders = list(holders)


def eject(app: Celery, force: bool = False) -> list[Ejected]:
    """Give back what any incarnation of a worker of the application's broker holds, a dead one's without a lease too.

    Raises LeasesAlive, with nothing given back, while a lease is alive. With ``force`` the living lose what they hold
    as well: they cannot settle it any more, and it runs twice. Errors of Redis and of its connection propagate.
    """
    book = LeaseBook.of(app)
    with book.client as client:
        holders = book.holders()
        alive = [holder for holder in holders if holder.ends_in_s > 0]
        if alive and not force:
            raise LeasesAlive(alive)
        names = [holder.incarnation for holder in holders]
        first = book.keys.unacked("")
        for key in client.scan_iter(match=_literally(first) + "*", count=1000):
            name = key.decode().removeprefix(first)
            if name not in names:
                names.append(name)
        return [went for name in names for went in _eject_one(book, name, force)]


def _eject_one(book: LeaseBook, name: str, force: bool) -> list[Ejected]:
    keys = [book.keys.leases, book.keys.drained, book.keys.unacked(name)]
    found = _EJECT(book.client, keys, [name, int(force)])
    if found is None:  # it has begun since we looked
        raise LeasesAlive([holder for holder in book.holders() if holder.incarnation == name])
    return [Ejected(name, key.decode(), messages) for key, messages in pairs(found)]


def _literally(text: str) -> str:
    """Return the pattern of Redis that matches ``text`` alone."""
    return re.sub(r"([*?\[\]\\])", r"\\\1", text)
