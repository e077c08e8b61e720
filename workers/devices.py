"""Which device this process computes on."""

from __future__ import annotations

import importlib.util


def choose_device(wanted: str | None) -> str:
    """Return ``wanted``, or ``cuda:0`` where this process sees a CUDA device, else ``cpu``.

    The first visible device is the process's own: one process per GPU sets CUDA_VISIBLE_DEVICES.
    """
    if wanted is not None:
        return wanted
    if importlib.util.find_spec("torch") is None:
        return "cpu"
    import torch

    return "cuda:0" if torch.cuda.is_available() else "cpu"
