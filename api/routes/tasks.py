"""Submitting calls."""

from __future__ import annotations

from apiflask import APIBlueprint
from flask import url_for

from ..gateway import gateway
from ..schemas import Accepted, Submit

blueprint = APIBlueprint("tasks", __name__, url_prefix="/v1/tasks", tag="Tasks")


@blueprint.post("/<name>")
@blueprint.input(Submit, arg_name="call")
@blueprint.output(Accepted, status_code=202, description="The call is in its queue")
@blueprint.doc(
    responses={
        400: "The body is not a JSON object",
        404: "No worker has published this task",
        413: "The body is too large",
        415: "The body is not application/json",
        503: "Redis is away; the call may have been queued all the same",
        507: "Redis is full",
    }
)
def submit(name: str, call: Submit) -> tuple[Accepted, dict[str, str]]:
    """Submit one call of a task

    The call waits in the task's queue until a worker takes it. Poll `href` for its result.
    """
    task_id = gateway().submit(name, call.input, call.options)
    href = url_for("results.read", task_id=task_id)
    return Accepted(id=task_id, href=href), {"Location": href}
