"""Reading results."""

from __future__ import annotations

import re

from apiflask import APIBlueprint
from flask import Response

from ..errors import InvalidId
from ..gateway import gateway
from ..schemas import CallStatus

blueprint = APIBlueprint("results", __name__, url_prefix="/v1/results", tag="Results")

_ID = re.compile(r"[A-Za-z0-9_-]{1,128}")


@blueprint.get("/<task_id>")
@blueprint.output(CallStatus)
@blueprint.doc(
    responses={
        400: "This cannot be an id",
        404: "There is no task of this id",
        410: "The result has expired",
        503: "Redis is away",
    }
)
def read(task_id: str) -> Response:
    """Read the state of a call, and its result or error

    Calls that the API submitted are known from the moment of their 202, others once Redis has a record.
    """
    if _ID.fullmatch(task_id) is None:
        raise InvalidId("An id is 1 to 128 letters, digits, hyphens and underscores.")
    return Response(gateway().status_json(task_id), mimetype="application/json")
