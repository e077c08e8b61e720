"""Tasks as applications declare and call them. Needs neither torch nor flask."""

from .app import configure
from .errors import BrokerFull
from .task import BatchTask, batch_tasks

__all__ = ["BrokerFull", "BatchTask", "batch_tasks", "configure"]
