"""Bodies of requests and answers, as callers see them and as the OpenAPI document describes them."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class Submit(_Body):
    """One call of a task."""

    input: Any = Field(description="The item, as the task's item schema has it.")
    options: dict[str, Any] = Field(default_factory=dict, description="The task's options, by name.")


class Accepted(_Body):
    """A call that is now in its queue."""

    id: str
    state: Literal["PENDING"] = "PENDING"
    href: str = Field(description="Where its result will be.")


class TaskError(_Body):
    """Why a call has no result, as plain data."""

    code: Literal["task_failed", "task_revoked", "result_unreadable"]
    type: str = Field(description="The name of the exception's class.")
    message: str


class CallStatus(_Body):
    """A call and what has become of it."""

    id: str
    state: Literal["PENDING", "STARTED", "RETRY", "SUCCESS", "FAILURE", "REVOKED"]
    result: Any = Field(default=None, description="Null until SUCCESS; absent when there is an error.")
    error: TaskError | None = Field(default=None, description="Only with FAILURE and REVOKED.")
    non_finite: bool = Field(
        default=False, description="True when NaN or an infinity in the result became null; else absent."
    )


class Health(_Body):
    """The process answers."""

    status: Literal["ok"] = "ok"


class ErrorDetail(_Body):
    code: str = Field(description="For programs; stable.")
    message: str = Field(description="For people.")
    field: str = Field(default="", description="The part of the request that is wrong; may be absent.")


# APIFlask takes its error schema as a dict and resolves no references in it.
ERROR_SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["error"],
    "properties": {"error": ErrorDetail.model_json_schema()},
}
