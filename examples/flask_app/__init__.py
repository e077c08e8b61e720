"""A Flask application that submits texts to a batched task and tells what became of them."""

from typing import Any

from celery.result import AsyncResult
from flask import Flask, request

from .celery_app import init_celery
from .tasks import keywords


def create_app(config: dict[str, Any] | None = None) -> Flask:
    """Return the application. FLASK_CELERY__broker_url and the like override what is set here."""
    app = Flask(__name__)
    app.config.from_mapping(
        CELERY={"broker_url": "redis://localhost/0", "result_backend": "redis://localhost/0"},
        STOP_WORDS=["a", "and", "of", "the", "to"],
    )
    app.config.from_prefixed_env()
    app.config.from_mapping(config)
    celery = init_celery(app)

    @app.post("/texts")
    def submit() -> tuple[dict[str, str], int]:
        return {"id": keywords.delay(request.get_data(as_text=True)).id}, 202

    @app.get("/texts/<call_id>")
    def poll(call_id: str) -> dict[str, Any]:
        call = AsyncResult(call_id, app=celery)
        return {"state": call.state, "keywords": call.result if call.successful() else None}

    return app
