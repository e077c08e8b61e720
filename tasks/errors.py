"""Errors of sending calls."""

from __future__ import annotations

from kombu.exceptions import OperationalError

from ..batching import BusloadError


class BrokerFull(BusloadError, OperationalError):
    """The broker has no memory left and takes no new calls. What it has accepted is still worked off."""
