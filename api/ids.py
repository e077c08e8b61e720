"""Ids that describe themselves: when the API minted them, and that it did.

Celery stores nothing at submit, so an id is all there is to tell a pending task from one that never was. Ids
are UUIDs of version 8 (RFC 9562, section 5.8); from the most significant bit:

    48  Unix time, milliseconds
     4  version, 0b1000
    12  sequence, high bits
     2  variant, 0b10
    30  sequence, low bits
    32  MAC: keyed BLAKE2b over the other 96 bits

The 42 bits of sequence are a nonce of 26 bits, drawn at random by each process, and a counter of 16 bits that
carries into it. So two ids of one process are the same only after 2^42 of them within one millisecond.
"""

from __future__ import annotations

import hashlib
import hmac
import itertools
import os
import secrets
import uuid

_SEQUENCE_BITS = 42
_VERSION = 0b1000
_VARIANT = 0b10

_sequence = itertools.count()


def _draw_nonce() -> None:
    global _sequence
    # next() on a count is atomic, so threads need no lock, and a fork can leave none held.
    _sequence = itertools.count(secrets.randbits(_SEQUENCE_BITS))


_draw_nonce()
os.register_at_fork(after_in_child=_draw_nonce)


def mint(key: bytes, now_ms: int) -> str:
    """Return a new id.

    Args:
        key: the secret that all API processes share, at most 64 bytes.
        now_ms: Unix time in milliseconds, below 2^48.
    """
    sequence = next(_sequence) % (1 << _SEQUENCE_BITS)
    head = now_ms << 16 | _VERSION << 12 | sequence >> 30
    tail = _VARIANT << 30 | sequence & (1 << 30) - 1
    unsigned = (head << 32 | tail).to_bytes(12)
    return str(uuid.UUID(bytes=unsigned + _mac(key, unsigned)))


def minted_at_ms(key: bytes, task_id: str) -> int | None:
    """Return when ``task_id`` was minted under ``key``, in Unix milliseconds; None where it was not."""
    try:
        parsed = uuid.UUID(task_id)
    except ValueError:
        return None
    unsigned, mac = parsed.bytes[:12], parsed.bytes[12:]
    # uuid.UUID also reads braces, capitals and URNs: other strings, under which nothing is stored.
    if str(parsed) != task_id or not hmac.compare_digest(mac, _mac(key, unsigned)):
        return None
    return int.from_bytes(unsigned[:6])


def _mac(key: bytes, unsigned: bytes) -> bytes:
    return hashlib.blake2b(unsigned, digest_size=4, key=key).digest()
