"""The tests' application in workers whose leases outlast every test: nothing comes back by their running out."""

from __future__ import annotations

from busload.workers import leases

leases.LEASE_S = 3600.0

from tests.integration.worker_app import app as app  # noqa: E402
