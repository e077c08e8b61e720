"""Remote control commands of a worker that runs batches."""

from __future__ import annotations

from typing import Any

from celery.worker.control import inspect_command


@inspect_command(alias="batches")
def batches(state: Any) -> dict[str, dict[str, float]]:
    """Batches, items, failures and seconds in the model, by task, since the worker started."""
    pipeline = getattr(state.consumer.controller, "batch_pipeline", None)
    return {} if pipeline is None else pipeline.stats.snapshot()
