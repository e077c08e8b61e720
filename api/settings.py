"""Settings of the API, read from the environment once, at the edge."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from pydantic import SecretStr

N = TypeVar("N", int, float)

DEFAULT_BROKER_URL = "redis://localhost:6379/0"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Where Redis is and how much the API accepts and waits.

    Raises:
        ValueError: a value is out of range; the message names it and never shows a URL.
    """

    broker_url: SecretStr = field(default_factory=lambda: SecretStr(DEFAULT_BROKER_URL))
    result_backend: SecretStr | None = None
    """URL of the Redis that keeps results and task specs; None: the broker is that Redis too."""
    max_body_bytes: int = 1 << 20
    redis_timeout_s: float = 0.75
    """Longest wait for one connect or one reply of Redis.

    When Redis falls silent, requests of that moment occupy the threads of a process: a probe may wait as long.
    """

    def __post_init__(self) -> None:
        if self.max_body_bytes < 1:
            raise ValueError(f"max_body_bytes must be >= 1, got {self.max_body_bytes}")
        if not (math.isfinite(self.redis_timeout_s) and self.redis_timeout_s > 0):
            raise ValueError(f"redis_timeout_s must be finite and > 0, got {self.redis_timeout_s}")
        if not self.result_backend_url.get_secret_value().startswith(("redis://", "rediss://", "redis+socket://")):
            raise ValueError(
                "BUSLOAD_RESULT_BACKEND, or BUSLOAD_BROKER_URL without it, must be a redis://, rediss:// or "
                "redis+socket:// URL"
            )

    @property
    def result_backend_url(self) -> SecretStr:
        return self.result_backend or self.broker_url

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> Settings:
        """Read the ``BUSLOAD_*`` variables; what is absent keeps its default."""
        backend = environ.get("BUSLOAD_RESULT_BACKEND")
        return cls(
            broker_url=SecretStr(environ.get("BUSLOAD_BROKER_URL", DEFAULT_BROKER_URL)),
            result_backend=None if backend is None else SecretStr(backend),
            max_body_bytes=_number(int, environ, "BUSLOAD_MAX_BODY_BYTES", cls.max_body_bytes),
            redis_timeout_s=_number(float, environ, "BUSLOAD_REDIS_TIMEOUT_S", cls.redis_timeout_s),
        )


def _number(kind: type[N], environ: Mapping[str, str], name: str, default: N) -> N:
    try:
        return kind(environ.get(name, default))
    except ValueError:
        raise ValueError(f"{name} must be a number, got {environ[name]!r}") from None
