import pickle

import pytest

from busload.api import Settings


def test_defaults() -> None:
    settings = Settings.from_env({})
    assert settings.broker_url.get_secret_value() == "redis://localhost:6379/0"
    assert settings.result_backend_url == settings.broker_url
    assert settings.max_body_bytes == 1 << 20


def test_reads_every_variable() -> None:
    settings = Settings.from_env(
        {
            "BUSLOAD_BROKER_URL": "redis://a/1",
            "BUSLOAD_RESULT_BACKEND": "rediss://b/2",
            "BUSLOAD_MAX_BODY_BYTES": "10",
            "BUSLOAD_REDIS_TIMEOUT_S": "0.5",
        }
    )
    assert settings.broker_url.get_secret_value() == "redis://a/1"
    assert settings.result_backend_url.get_secret_value() == "rediss://b/2"
    assert (settings.max_body_bytes, settings.redis_timeout_s) == (10, 0.5)


def test_passwords_stay_out_of_repr() -> None:
    settings = Settings.from_env({"BUSLOAD_BROKER_URL": "redis://:hunter2@h/0"})
    assert "hunter2" not in repr(settings)
    assert pickle.loads(pickle.dumps(settings)) == settings  # noqa: S301 (granian may spawn its workers)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("BUSLOAD_MAX_BODY_BYTES", "0", "max_body_bytes must be >= 1, got 0"),
        ("BUSLOAD_REDIS_TIMEOUT_S", "nan", "redis_timeout_s must be finite and > 0, got nan"),
        ("BUSLOAD_REDIS_TIMEOUT_S", "-1", "redis_timeout_s must be finite and > 0, got -1"),
        (
            "BUSLOAD_RESULT_BACKEND",
            "rpc://:hunter2@h",
            "BUSLOAD_RESULT_BACKEND, or BUSLOAD_BROKER_URL without it, must be a redis://",
        ),
    ],
)
def test_what_is_out_of_range_is_refused_by_name(name: str, value: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as raised:
        Settings.from_env({name: value})
    assert "hunter2" not in str(raised.value)
