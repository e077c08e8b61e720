import pytest

from busload.batching import NEVER, NOW, GreedyPolicy, StaticPolicy, make_policy


def test_static_flushes_a_full_batch_even_behind_a_running_one() -> None:
    assert StaticPolicy(8, 50).flush_at(8, oldest_at=100.0, runner_free=False) == NOW


def test_static_lets_an_incomplete_batch_wait_from_its_oldest_item() -> None:
    assert StaticPolicy(8, 50).flush_at(7, oldest_at=100.0, runner_free=True) == pytest.approx(100.050)


def test_static_keeps_an_incomplete_batch_filling_behind_a_running_one() -> None:
    assert StaticPolicy(8, 50).flush_at(7, oldest_at=0.0, runner_free=False) == NEVER


def test_greedy_flushes_one_item_as_soon_as_the_runner_is_free() -> None:
    assert GreedyPolicy(8).flush_at(1, oldest_at=100.0, runner_free=True) == NOW
    assert GreedyPolicy(8).flush_at(7, oldest_at=100.0, runner_free=False) == NEVER
    assert GreedyPolicy(8).flush_at(8, oldest_at=100.0, runner_free=False) == NOW


@pytest.mark.parametrize("size", [0, -1])
def test_a_batch_holds_at_least_one_item(size: int) -> None:
    with pytest.raises(ValueError, match=f"max_batch_size must be >= 1, got {size}"):
        StaticPolicy(max_batch_size=size)
    with pytest.raises(ValueError, match=f"max_batch_size must be >= 1, got {size}"):
        GreedyPolicy(max_batch_size=size)


@pytest.mark.parametrize("size", [64.0, "64", True])
def test_a_batch_size_is_an_int(size: object) -> None:
    with pytest.raises(TypeError, match="max_batch_size must be an int"):
        StaticPolicy(max_batch_size=size)  # type: ignore[arg-type]


@pytest.mark.parametrize("wait", [-1.0, float("nan"), float("inf")])
def test_a_wait_is_finite(wait: float) -> None:
    with pytest.raises(ValueError, match="max_wait_ms must be a finite number >= 0"):
        StaticPolicy(max_wait_ms=wait)


def test_policies_are_made_by_name() -> None:
    assert make_policy("static", 8, 20.0) == StaticPolicy(8, 20.0)
    assert make_policy("greedy", 8, 20.0) == GreedyPolicy(8)
    with pytest.raises(ValueError, match="policy must be 'static' or 'greedy', got 'eager'"):
        make_policy("eager", 8, 20.0)
