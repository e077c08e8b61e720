"""Run by ``manage.py test``, with a worker in this process."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from celery.signals import before_task_publish
from config import celery_app
from django.db import transaction
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.backends.signals import connection_created
from django.dispatch import Signal
from django.test import TransactionTestCase

from busload.testing import in_memory_worker

from .models import Review
from .tasks import rate

DEADLINE_S = 10.0


class Cancelled(Exception):
    """Rolls a transaction back."""


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@contextmanager
def connected(signal: Signal, receiver: Callable[..., None]) -> Iterator[None]:
    signal.connect(receiver, weak=False)
    try:
        yield
    finally:
        signal.disconnect(receiver)


@contextmanager
def connections_of_the_worker() -> Iterator[list[BaseDatabaseWrapper]]:
    """Collect the database connections that its threads open, one for each batch."""
    opened: list[BaseDatabaseWrapper] = []

    def remember(connection: BaseDatabaseWrapper, **_: Any) -> None:
        if threading.current_thread() is not threading.main_thread():
            opened.append(connection)

    with connected(connection_created, remember):
        yield opened


class RatingTest(TransactionTestCase):
    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        cls.enterClassContext(in_memory_worker(celery_app))

    def test_a_posted_review_gets_its_stars(self) -> None:
        answer = self.client.post("/reviews", "A good, good bus", content_type="text/plain")
        assert answer.status_code == 202
        review = f"/reviews/{answer.json()['id']}"
        wait_until(lambda: self.client.get(review).json() == {"stars": 3})

    def test_reviews_ride_together_and_a_missing_one_fails_alone(self) -> None:
        reviews = Review.objects.bulk_create(Review(text="good " * number) for number in range(3))
        with connections_of_the_worker() as opened:
            calls = [rate.delay(pk) for pk in [*(review.pk for review in reviews), 0]]
            assert [call.get(timeout=DEADLINE_S) for call in calls[:3]] == [1, 2, 3]
            with self.assertRaisesMessage(LookupError, "no review 0"):
                calls[3].get(timeout=DEADLINE_S)
        assert len(opened) < len(calls)

    def test_only_a_commit_sends_the_task(self) -> None:
        sent: list[int] = []

        def remember(body: Any, **_: Any) -> None:
            (args, *_) = body
            sent.extend(args)

        with connected(before_task_publish, remember):
            with suppress(Cancelled), transaction.atomic():
                rate.delay_on_commit(Review.objects.create(text="never was").pk)
                raise Cancelled
            assert sent == []
            with transaction.atomic():
                review = Review.objects.create(text="is good")
                rate.delay_on_commit(review.pk)
                assert sent == []
            assert sent == [review.pk]
        wait_until(lambda: Review.objects.get(pk=review.pk).stars == 2)

    def test_a_batch_leaves_no_connection_open(self) -> None:
        with connections_of_the_worker() as opened:
            for batches in (1, 2):
                rate.delay(Review.objects.create(text="good").pk).get(timeout=DEADLINE_S)
                assert len(opened) == batches
                assert opened[-1].settings_dict["CONN_MAX_AGE"] == 0
                wait_until(lambda: opened[-1].connection is None)
