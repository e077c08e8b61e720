"""Where the worker finds the Celery application: ``celery -A flask_app.make_celery worker``."""

from . import create_app

app = create_app().extensions["celery"]
