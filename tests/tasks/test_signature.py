from dataclasses import dataclass
from typing import Any, Literal

import pytest

from busload.tasks.signature import CallSignature


def embed(texts: list[str], /, *, normalize: bool = True, dimensions: int | None = None) -> list[list[float]]:
    raise NotImplementedError


def generate(prompts: list[str], /, *, mode: Literal["greedy", "sample"], max_new_tokens: list[int] = 20) -> list[str]:  # type: ignore[assignment]
    raise NotImplementedError


def anything(items, /, *, option=None):  # type: ignore[no-untyped-def]
    raise NotImplementedError


@pytest.mark.parametrize(
    ("args", "options"),
    [
        (("a",), {}),
        (["a"], {"normalize": False, "dimensions": 8}),
        (("a",), None),
        (("a",), {"dimensions": None}),
    ],
)
def test_a_fitting_call_passes(args: Any, options: Any) -> None:
    CallSignature.of_function(embed).check(args, options)


@pytest.mark.parametrize(
    ("args", "options", "message"),
    [
        ((), {}, r"embed\(\) takes exactly one positional argument, the item; got none"),
        (None, {}, "got none"),
        (("a", "b"), {}, "got 2"),
        (("a",), {"speed": 1}, "unknown field `speed`"),
        (("a",), {"normalize": "yes"}, r"Expected `bool`, got `str` - at `\$.normalize`"),
        (("a",), {"normalize": 1}, "Expected `bool`, got `int`"),
        (("a",), {"dimensions": 1.5}, r"Expected `int \| null`, got `float`"),
    ],
)
def test_a_wrong_call_is_a_type_error(args: Any, options: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        CallSignature.of_function(embed).check(args, options)


def test_an_option_without_default_is_required() -> None:
    with pytest.raises(TypeError, match="missing required field `mode`"):
        CallSignature.of_function(generate, ["max_new_tokens"]).check(("a",), {})


def test_a_per_item_option_is_one_value_in_a_call() -> None:
    signature = CallSignature.of_function(generate, ["max_new_tokens"])
    signature.check(("a",), {"mode": "greedy", "max_new_tokens": 3})
    with pytest.raises(TypeError, match="max_new_tokens"):
        signature.check(("a",), {"mode": "greedy", "max_new_tokens": [3]})


def test_options_split_into_shared_and_own() -> None:
    signature = CallSignature.of_function(generate, ["max_new_tokens"])
    assert signature.split({"mode": "greedy", "max_new_tokens": 3}) == ({"mode": "greedy"}, {"max_new_tokens": 3})
    assert signature.split({"mode": "greedy"}) == ({"mode": "greedy"}, {"max_new_tokens": 20})


@pytest.mark.parametrize("item", [None, 5, ["a"], {"a": 1}, b"a"])
def test_an_item_of_another_type_is_a_type_error(item: Any) -> None:
    with pytest.raises(TypeError, match=r"embed\(\) item: Expected `str`"):
        CallSignature.of_function(embed).check_item(item)


def test_without_annotations_every_item_and_option_passes() -> None:
    signature = CallSignature.of_function(anything)
    signature.check((object(),), {"option": object()})
    signature.check_item(object())
    assert signature.item_schema() == {}


def test_a_type_that_does_not_travel_as_json_is_not_checked() -> None:
    class Image: ...

    def classify(images: list[Image], /) -> list[str]:
        raise NotImplementedError

    CallSignature.of_function(classify).check_item("not an image")


def test_schemas_describe_the_item_and_the_options() -> None:
    @dataclass
    class Pair:
        left: str
        right: str

    def compare(pairs: list[Pair], /, *, limit: int = 3) -> list[float]:
        raise NotImplementedError

    compare.__annotations__["pairs"] = list[Pair]
    signature = CallSignature.of_function(compare)
    assert signature.item_schema()["$defs"]["Pair"]["required"] == ["left", "right"]
    options = signature.options_schema()["$defs"]["compare_options"]
    assert options["properties"] == {"limit": {"type": "integer"}}
    assert options["additionalProperties"] is False


def test_a_function_must_take_the_items_first_and_options_by_keyword() -> None:
    def no_items(*, option: int = 1) -> list[str]:
        raise NotImplementedError

    def two_positions(items: list[str], second: int = 1) -> list[str]:
        raise NotImplementedError

    def swallows(items: list[str], **options: Any) -> list[str]:
        raise NotImplementedError

    with pytest.raises(TypeError, match="must take the list of items as its first positional parameter"):
        CallSignature.of_function(no_items)
    with pytest.raises(TypeError, match=r"by keyword only; put '\*' before 'second'"):
        CallSignature.of_function(two_positions)
    with pytest.raises(TypeError, match="by keyword only"):
        CallSignature.of_function(swallows)


def test_per_item_names_options_that_exist() -> None:
    with pytest.raises(TypeError, match=r"embed\(\) has no option named max_tokens"):
        CallSignature.of_function(embed, ["max_tokens"])
