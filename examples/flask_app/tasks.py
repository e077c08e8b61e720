"""What rides in batches. A word filter stands in for the model."""

from celery import shared_task
from flask import current_app

from .celery_app import FlaskBatchTask


@shared_task(base=FlaskBatchTask, name="keywords", max_batch_size=32, max_wait_ms=20)
def keywords(texts: list[str], /) -> list[list[str]]:
    """Return the words of each text that carry meaning."""
    stop_words = set(current_app.config["STOP_WORDS"])
    return [[word for word in text.lower().split() if word not in stop_words] for text in texts]
