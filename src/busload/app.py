"""An application with the ready tasks: ``celery -A busload.app worker -P threads -c 1``.

BUSLOAD_BROKER_URL and BUSLOAD_RESULT_BACKEND (default: the broker) say where its Redis is.
"""

import os

from celery import Celery

from .tasks import configure

QUEUE = "busload"
"""Of the ready tasks, so that workers of other applications on the same Redis do not take their calls."""

DEFAULT_BROKER_URL = "redis://localhost:6379/0"

_broker_url = os.environ.get("BUSLOAD_BROKER_URL", DEFAULT_BROKER_URL)

app = configure(
    Celery(
        "busload",
        broker=_broker_url,
        backend=os.environ.get("BUSLOAD_RESULT_BACKEND", _broker_url),
        include=["busload.tasks.ready"],
    )
)
app.conf.task_default_queue = QUEUE
