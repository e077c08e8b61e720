"""The application of ``busload demo``: the ready task, and the same model one text at a time to compare with."""

from __future__ import annotations

from .app import app
from .tasks.ready import Embed


class EmbedAlone(Embed):
    """``busload.embed`` without batching."""

    name = "demo.embed_alone"
    max_batch_size = 1


app.register_task(EmbedAlone())
