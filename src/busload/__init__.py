"""Celery tasks that ride the GPU together: one batched call, one result per caller."""

from .batching import BusloadError, ResultCountError, ResultEncodeError
from .tasks import BatchTask, BrokerFull, configure

__version__ = "0.1.0"

__all__ = [
    "BatchTask",
    "BrokerFull",
    "BusloadError",
    "ResultCountError",
    "ResultEncodeError",
    "configure",
]
