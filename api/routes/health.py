"""Probes."""

from __future__ import annotations

from apiflask import APIBlueprint

from ..schemas import Health

blueprint = APIBlueprint("health", __name__, tag="Probes")


@blueprint.get("/healthz")
@blueprint.output(Health)
def healthz() -> Health:
    """Say that this process answers

    Touches nothing outside the process.
    """
    return Health()
