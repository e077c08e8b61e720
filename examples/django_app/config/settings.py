"""Settings of the example: REDIS_URL and DATABASE_PATH say where its data is."""

import os
from pathlib import Path

DATABASE_PATH = os.environ.get("DATABASE_PATH", str(Path(__file__).parents[1] / "db.sqlite3"))
DATABASES = {
    "default": {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": DATABASE_PATH,
        # Web server and worker write to one file; each shall wait for the other from the start of a transaction.
        "OPTIONS": {"transaction_mode": "IMMEDIATE"},
        # A file for tests as well, where threads have connections of their own; Django would take memory.
        "TEST": {"NAME": f"{DATABASE_PATH}.test"},
    }
}
INSTALLED_APPS = ["reviews"]
ROOT_URLCONF = "reviews.urls"
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
ALLOWED_HOSTS = ["127.0.0.1", "localhost"]

CELERY_BROKER_URL = os.environ.get("REDIS_URL", "redis://localhost/0")
CELERY_RESULT_BACKEND = CELERY_BROKER_URL
