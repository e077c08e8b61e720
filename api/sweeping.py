"""Gives back what dead workers hold, from the API as well: where all workers died, somebody must."""

from __future__ import annotations

import logging
import threading
import time

import redis
from celery import Celery
from kombu.exceptions import OperationalError

from ..tasks.leases import RENEW_S, LeaseBook, Sweeper

logger = logging.getLogger(__name__)


def sweep_in_background(celery: Celery) -> None:
    """Look for leases that have run out on a thread of this process, until that ends."""
    threading.Thread(target=_sweep, args=(celery,), name="busload-sweep", daemon=True).start()


def _sweep(celery: Celery) -> None:
    sweeper: Sweeper | None = None
    while True:
        try:
            if sweeper is None:
                sweeper = Sweeper(LeaseBook.of(celery))
            sweeper.sweep()
        except (redis.RedisError, OperationalError, OSError) as error:
            # Requests find that out as well, and say so.
            logger.debug("no sweep: %r", error)
        time.sleep(RENEW_S)
