"""The Flask application."""

from __future__ import annotations

from typing import Any

from apiflask import APIFlask

from .errors import register_error_handlers
from .gateway import Gateway
from .request_body import StrictJsonRequest
from .routes import blueprints
from .schemas import ERROR_SCHEMA
from .settings import Settings


def create_app(settings: Settings) -> APIFlask:
    """Return the API as a WSGI application. Connects to nothing until the first request that needs Redis."""
    app = APIFlask("busload.api", title="busload", version="1", json_errors=False)
    app.request_class = StrictJsonRequest
    # A redirect would be the one answer in HTML.
    app.url_map.merge_slashes = False
    app.config.update(
        # Werkzeug cuts a chunked body off here without a word; the byte more is how get_json can tell.
        MAX_CONTENT_LENGTH=settings.max_body_bytes + 1,
        # It would be the host that the first reader of the document happened to ask for.
        AUTO_SERVERS=False,
        HTTP_ERROR_SCHEMA=ERROR_SCHEMA,
        VALIDATION_ERROR_SCHEMA=ERROR_SCHEMA,
    )
    app.json.sort_keys = False  # type: ignore[attr-defined]
    app.json.compact = True  # type: ignore[attr-defined]
    app.extensions["busload"] = Gateway.from_settings(settings)
    app.spec_processor(_require_bodies)
    register_error_handlers(app)
    for blueprint in blueprints:
        app.register_blueprint(blueprint)
    return app


def _require_bodies(spec: dict[str, Any] | str) -> dict[str, Any] | str:
    """Say that bodies are required, which APIFlask leaves out and OpenAPI then takes as optional."""
    assert isinstance(spec, dict), "the document is built for JSON"
    for path in spec["paths"].values():
        for operation in path.values():
            if "requestBody" in operation:
                operation["requestBody"]["required"] = True
    return spec
