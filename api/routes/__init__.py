"""The routes, one module a resource."""

from . import health, results, tasks

blueprints = (health.blueprint, tasks.blueprint, results.blueprint)
