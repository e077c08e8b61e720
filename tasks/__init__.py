"""Tasks as applications declare and call them. Needs neither torch nor flask."""

from .app import configure
from .task import BatchTask, batch_tasks

__all__ = ["BatchTask", "batch_tasks", "configure"]
