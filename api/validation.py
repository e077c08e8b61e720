"""Checks inputs and options against the JSON Schemas that workers publish."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, cast

from jsonschema import Draft202012Validator
from jsonschema.exceptions import ValidationError
from referencing.jsonschema import EMPTY_REGISTRY

from ..tasks.registry import TaskSpec
from .errors import ApiError, InvalidInput, InvalidOptions

MAX_MESSAGE_CHARS = 200
RESERVED_KEYS = {"__type__", "__value__"}


def check(spec: TaskSpec, item: Any, options: dict[str, Any]) -> None:
    """Check one call of a task.

    Raises:
        InvalidInput: the item is not what the task takes.
        InvalidOptions: an option is missing, unknown or not what the task takes.
    """
    _check(item, spec.item_schema, "input", InvalidInput)
    _check(options, spec.options_schema, "options", InvalidOptions)


def _check(value: Any, schema: dict[str, Any], root: str, invalid: type[ApiError]) -> None:
    # With a registry of its own the validator fetches no reference over the network.
    error = next(Draft202012Validator(schema, registry=EMPTY_REGISTRY).iter_errors(value), None)
    if error is not None:
        raise invalid(_message(error), field=_path(root, [*error.absolute_path, *_culprit(error)]))
    reserved = _find_reserved(value)
    if reserved is not None:
        # kombu reads such an object as a date, a UUID or the like, or fails to: it would not arrive as sent.
        raise invalid("an object of just __type__ and __value__ is reserved", field=_path(root, reserved))


def _message(error: ValidationError) -> str:
    """Say what the schema wants. jsonschema's own message shows the value, which may be large or secret."""
    match error.validator:
        case "required":
            return "is required"
        case "additionalProperties":
            return "is not known"
        case keyword:
            return f"does not satisfy {keyword} {json.dumps(error.validator_value)}"[:MAX_MESSAGE_CHARS]


def _culprit(error: ValidationError) -> list[str]:
    """Return the one key that is missing or unknown, where the error is about keys."""
    instance, schema = cast("dict[str, Any]", error.instance), cast("dict[str, Any]", error.schema)
    match error.validator:
        case "required":
            return [key for key in schema["required"] if key not in instance][:1]
        case "additionalProperties":
            return [key for key in instance if key not in schema.get("properties", {})][:1]
        case _:
            return []


def _find_reserved(value: Any) -> tuple[str | int, ...] | None:
    pending: list[tuple[tuple[str | int, ...], Any]] = [((), value)]
    while pending:
        path, value = pending.pop()
        if isinstance(value, dict):
            if value.keys() == RESERVED_KEYS:
                return path
            pending.extend(((*path, key), child) for key, child in value.items() if isinstance(child, dict | list))
        elif isinstance(value, list):
            pending.extend(
                ((*path, index), child) for index, child in enumerate(value) if isinstance(child, dict | list)
            )
    return None


def _path(root: str, keys: Iterable[str | int]) -> str:
    return root + "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in keys)
