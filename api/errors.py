"""Every error that the API answers with, and the one shape they all have."""

from __future__ import annotations

import json
from http import HTTPStatus
from typing import Any, ClassVar

from apiflask import APIFlask
from apiflask.exceptions import HTTPError
from flask import Response, current_app
from werkzeug.exceptions import HTTPException

MAX_FIELD_CHARS = 200


class ApiError(Exception):
    """An answer other than success. Subclasses fix its status and code.

    Args:
        message: for people; never shows what a caller sent, nor a secret.
        field: the part of the request that is wrong, such as ``options.normalize`` or ``input[3]``.
    """

    status: ClassVar[int]
    code: ClassVar[str]
    headers: ClassVar[dict[str, str]] = {}

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.field = field if field is None else field[:MAX_FIELD_CHARS]


class InvalidJson(ApiError):
    status, code = 400, "invalid_json"


class UnsupportedMediaType(ApiError):
    status, code = 415, "unsupported_media_type"


class InvalidRequest(ApiError):
    status, code = 422, "invalid_request"


class InvalidInput(ApiError):
    status, code = 422, "invalid_input"


class InvalidOptions(ApiError):
    status, code = 422, "invalid_options"


class UnknownTask(ApiError):
    status, code = 404, "unknown_task"


class InvalidId(ApiError):
    status, code = 400, "invalid_id"


class UnknownId(ApiError):
    status, code = 404, "unknown_id"


class Expired(ApiError):
    status, code = 410, "expired"


class Unavailable(ApiError):
    status = 503
    headers = {"Retry-After": "1"}


class BrokerUnavailable(Unavailable):
    code = "broker_unavailable"


class BackendUnavailable(Unavailable):
    code = "backend_unavailable"


class StorageFull(ApiError):
    status, code = 507, "storage_full"


def register_error_handlers(app: APIFlask) -> None:
    """Make every error of ``app``, Flask's own and unexpected ones too, a JSON body of the one shape."""
    app.register_error_handler(ApiError, _answer_api_error)
    app.register_error_handler(HTTPException, _answer_http_exception)
    app.register_error_handler(HTTPError, _answer_misfit)
    app.register_error_handler(Exception, _answer_unexpected)


def _answer_api_error(error: ApiError) -> Response:
    return _answer(error.status, error.code, error.message, field=error.field, headers=error.headers)


def _answer_http_exception(error: HTTPException) -> Response:
    status = error.code or 500
    code = "too_large" if status == 413 else HTTPStatus(status).name.lower()
    headers = {name: value for name, value in error.get_headers() if name.lower() != "content-type"}
    return _answer(status, code, error.description or HTTPStatus(status).phrase, headers=headers)


def _answer_misfit(error: HTTPError) -> Response:
    """Answer a request that does not fit its model: APIFlask reports ``{location: {field: [message]}}``."""
    [[field, messages], *_] = next(iter(error.detail.values())).items()
    return _answer(InvalidRequest.status, InvalidRequest.code, messages[0], field=field[:MAX_FIELD_CHARS])


def _answer_unexpected(error: Exception) -> Response:
    current_app.logger.error("unexpected error", exc_info=error)
    return _answer(500, "internal_error", "The server met an unexpected error; its log says more.")


def _answer(
    status: int, code: str, message: str, *, field: str | None = None, headers: dict[str, str] | None = None
) -> Response:
    error: dict[str, Any] = {"code": code, "message": message}
    if field is not None:
        error["field"] = field
    return Response(json.dumps({"error": error}, separators=(",", ":")), status, headers, mimetype="application/json")
