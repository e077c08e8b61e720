"""The project. Importing it makes its Celery application the one of all shared tasks."""

from .celery import app as celery_app

__all__ = ["celery_app"]
