"""The Celery application, with its settings in Django's under the prefix CELERY_."""

import os

from celery import Celery

from busload import configure

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "config.settings")

app = configure(Celery("config"))
app.config_from_object("django.conf:settings", namespace="CELERY")
app.autodiscover_tasks()
