"""Celery for Flask: every task runs inside the application context, a batched one once per batch."""

from typing import Any

from celery import Celery, Task
from flask import Flask

from busload import BatchTask, configure


class FlaskTask(Task):
    """A task as Flask's documentation wants it."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self.app.flask_app.app_context():
            return self.run(*args, **kwargs)


class FlaskBatchTask(FlaskTask, BatchTask):
    """A batched task that does the same."""


def init_celery(app: Flask) -> Celery:
    """Give ``app`` its Celery application, ``app.extensions["celery"]``."""
    celery = configure(Celery(app.name, task_cls=FlaskTask))
    celery.config_from_object(app.config["CELERY"])
    celery.set_default()
    celery.flask_app = app
    app.extensions["celery"] = celery
    return celery
