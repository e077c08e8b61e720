"""The call that a batch function accepts: one item, and options checked against its signature."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import msgspec

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


class CallSignature:
    """What one call of a task may carry: an item of ``item_type`` and keyword options.

    ``options`` are keyword-only parameters. ``per_item`` names those that callers of one batch need not share:
    the batch function receives each of these as a list beside the items, so the annotation ``list[int]`` makes
    the option of one call an ``int``.

    Raises TypeError for options that a batch cannot have.
    """

    def __init__(
        self,
        name: str,
        item_type: Any,
        options: Iterable[inspect.Parameter],
        hints: Mapping[str, Any],
        per_item: Iterable[str] = (),
    ) -> None:
        options = list(options)
        for parameter in options:
            if parameter.kind is not inspect.Parameter.KEYWORD_ONLY:
                raise TypeError(f"{name}() may take options by keyword only; put '*' before {parameter.name!r}")
        self.name = name
        self.item_type = _supported(item_type)
        if isinstance(per_item, str):
            raise TypeError(f"{name}(): per_item takes a tuple of names, got {per_item!r}")
        self.per_item = frozenset(per_item)
        if unknown := self.per_item - {parameter.name for parameter in options}:
            raise TypeError(f"{name}() has no option named {', '.join(sorted(unknown))} (per_item)")
        self.defaults = {p.name: p.default for p in options if p.default is not inspect.Parameter.empty}
        self._options = msgspec.defstruct(
            f"{name}_options",
            [self._field(parameter, hints.get(parameter.name, Any)) for parameter in options],
            kw_only=True,
            forbid_unknown_fields=True,
        )

    @classmethod
    def of_function(cls, function: Callable[..., Any], per_item: Iterable[str] = ()) -> CallSignature:
        """Read ``function(items, /, *, option=...)``, whose first parameter takes the list of items."""
        name = function.__name__
        parameters = list(inspect.signature(function).parameters.values())
        if not parameters or parameters[0].kind not in _POSITIONAL:
            raise TypeError(
                f"{name}() must take the list of items as its first positional parameter, after self if bound"
            )
        hints = _type_hints(function)
        item_type = _element_type(hints.get(parameters[0].name, Any))
        return cls(name, item_type, parameters[1:], hints, per_item)

    @classmethod
    def of_model(
        cls, name: str, prepare: Callable[..., Any], options: Callable[..., Any], per_item: Iterable[str] = ()
    ) -> CallSignature:
        """Read the class form: the item from ``prepare(items, options)``, the rest from ``options(*, ...)``."""
        first = next(iter(inspect.signature(prepare).parameters))
        item_type = _element_type(_type_hints(prepare).get(first, Any))
        parameters = inspect.signature(options).parameters.values()
        return cls(name, item_type, parameters, _type_hints(options), per_item)

    def check(self, args: Sequence[Any] | None, options: Mapping[str, Any] | None) -> None:
        """Raise TypeError unless ``args`` holds exactly the item and ``options`` fit the signature."""
        if len(args or ()) != 1:
            got = "none" if not args else f"{len(args)}"
            raise TypeError(f"{self.name}() takes exactly one positional argument, the item; got {got}")
        try:
            msgspec.convert(dict(options or {}), self._options, strict=True)
        except msgspec.ValidationError as error:
            raise TypeError(f"{self.name}() options: {error}") from None

    def check_item(self, item: Any) -> None:
        """Raise TypeError unless ``item`` has the type that the function's annotation promises it."""
        if self.item_type is Any:
            return
        try:
            msgspec.convert(item, self.item_type, strict=True)
        except msgspec.ValidationError as error:
            raise TypeError(f"{self.name}() item: {error}") from None

    def split(self, options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the options that callers of one batch share, and those that each item has for itself.

        Omitted options take the default of the signature. The dicts may be shared with other calls.
        """
        if not options:
            return self._bare
        return self._split(options)

    @cached_property
    def _bare(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """The options of a call that gives none."""
        return self._split({})

    def _split(self, options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        given = {**self.defaults, **options}
        shared = {name: value for name, value in given.items() if name not in self.per_item}
        own = {name: given.get(name) for name in self.per_item}
        return shared, own

    def batch_of_one(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return ``options`` of one call as the batch function takes them: a list for each per-item one."""
        shared, own = self.split(options)
        return {**shared, **{name: [value] for name, value in own.items()}}

    def item_schema(self) -> dict[str, Any]:
        """JSON Schema of one item; the empty schema where the annotation says nothing."""
        return {} if self.item_type is Any else msgspec.json.schema(self.item_type)

    def options_schema(self) -> dict[str, Any]:
        """JSON Schema of the object of options."""
        return msgspec.json.schema(self._options)

    def _field(self, parameter: inspect.Parameter, hint: Any) -> Any:
        kind = _supported(_element_type(hint) if parameter.name in self.per_item else hint)
        if parameter.default is inspect.Parameter.empty:
            return parameter.name, kind
        default = parameter.default
        return parameter.name, kind, msgspec.field(default_factory=lambda: default)


def _type_hints(function: Callable[..., Any]) -> dict[str, Any]:
    try:
        return typing.get_type_hints(function)
    except NameError:  # a name that exists for the type checker only
        return {}


def _element_type(hint: Any) -> Any:
    """Return ``T`` of ``list[T]`` and its like, Any where there is no telling."""
    arguments = typing.get_args(hint)
    is_sequence = isinstance(typing.get_origin(hint), type) and issubclass(typing.get_origin(hint), Iterable)
    return arguments[0] if is_sequence and arguments else Any


def _supported(hint: Any) -> Any:
    """Return ``hint``, or Any where values of that type do not travel as JSON and cannot be checked."""
    try:
        msgspec.json.schema(hint)
    except (TypeError, ValueError):
        return Any
    return hint
