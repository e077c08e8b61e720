"""The REST API of busload. Needs flask, and neither torch nor the module that declares the tasks."""

from .app import create_app
from .settings import Settings

__all__ = ["Settings", "create_app"]
