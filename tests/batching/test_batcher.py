"""The batcher against its three promises: nothing lost, doubled or reordered; never too large; never too late."""

from collections import defaultdict

from hypothesis import given
from hypothesis import strategies as st

from busload.batching import NEVER, Batch, Batcher, GreedyPolicy, StaticPolicy

SIZE = 4
WAIT_MS = 50.0
PARTITIONS = "abc"

# What happens to a batcher, each step so many milliseconds after the one before.
STEPS = st.lists(
    st.tuples(
        st.integers(0, 40),
        st.one_of(
            st.sampled_from([("offer", partition) for partition in PARTITIONS]),
            st.sampled_from([("flush", True), ("flush", False)]),
        ),
    ),
    max_size=80,
)


def batcher(size: int = SIZE, wait_ms: float = WAIT_MS) -> Batcher[str, int]:
    return Batcher(lambda partition: StaticPolicy(size, wait_ms))


@given(STEPS)
def test_no_item_is_lost_doubled_or_reordered_within_its_partition(steps: list[tuple[int, tuple[str, object]]]) -> None:
    waiting, offered, left = batcher(), defaultdict(list), defaultdict(list)
    now = 0.0
    for item, (after_ms, (action, argument)) in enumerate(steps):
        now += after_ms / 1000
        if action == "offer":
            waiting.offer(str(argument), item, now)
            offered[argument].append(item)
        elif batch := waiting.flush_due(now, runner_free=bool(argument)):
            left[batch.partition] += batch.items
    for batch in waiting.drain():
        left[batch.partition] += batch.items
    assert left == offered
    assert len(waiting) == 0


@given(STEPS)
def test_no_batch_is_larger_than_its_policy_allows(steps: list[tuple[int, tuple[str, object]]]) -> None:
    waiting = batcher()
    batches: list[Batch[str, int]] = []
    now = 0.0
    for item, (after_ms, (action, argument)) in enumerate(steps):
        now += after_ms / 1000
        if action == "offer":
            waiting.offer(str(argument), item, now)
        elif batch := waiting.flush_due(now, runner_free=bool(argument)):
            batches.append(batch)
    batches += waiting.drain()
    assert all(1 <= len(batch.items) <= SIZE for batch in batches)


@given(st.lists(st.tuples(st.integers(0, 60), st.sampled_from(PARTITIONS)), min_size=1, max_size=60))
def test_later_arrivals_never_hold_the_oldest_item_past_its_wait(arrivals: list[tuple[int, str]]) -> None:
    """A worker that looks whenever next_flush_at says so lets no item wait longer than max_wait_ms."""
    waiting = batcher()
    offered_at: dict[int, float] = {}
    now = 0.0

    def flush_until(until: float) -> None:
        while (due_at := waiting.next_flush_at()) <= until:
            batch = waiting.flush_due(max(due_at, 0.0))
            assert batch is not None
            for item in batch.items:
                assert due_at <= offered_at[item] + WAIT_MS / 1000 + 1e-9

    for item, (after_ms, partition) in enumerate(arrivals):
        flush_until(now + after_ms / 1000)
        now += after_ms / 1000
        waiting.offer(partition, item, now)
        offered_at[item] = now
    flush_until(now + 1.0)
    assert len(waiting) == 0


def test_lone_item_flushes_at_max_wait() -> None:
    waiting = batcher()
    waiting.offer("a", 1, now=0.0)
    assert waiting.flush_due(now=0.049) is None
    assert waiting.next_flush_at() == 0.050
    assert waiting.flush_due(now=0.050) == Batch("a", [1])


def test_full_batch_flushes_at_once_and_the_rest_waits() -> None:
    waiting = batcher()
    for item in range(SIZE + 1):
        waiting.offer("a", item, now=0.0)
    assert waiting.flush_due(now=0.0, runner_free=False) == Batch("a", [0, 1, 2, 3])
    assert waiting.flush_due(now=0.0) is None
    assert len(waiting) == 1


def test_due_batch_with_the_oldest_item_goes_first() -> None:
    waiting = batcher()
    waiting.offer("late", 1, now=0.010)
    waiting.offer("early", 2, now=0.000)
    assert waiting.flush_due(now=1.0) == Batch("early", [2])
    assert waiting.flush_due(now=1.0) == Batch("late", [1])


def test_full_partition_does_not_overtake_an_overdue_one() -> None:
    waiting = batcher()
    waiting.offer("overdue", 0, now=0.0)
    for item in range(SIZE):
        waiting.offer("full", item, now=0.060)
    first = waiting.flush_due(now=0.060)
    assert first is not None
    assert first.partition == "overdue"


def test_full_batches_that_keep_coming_do_not_hold_back_an_overdue_one() -> None:
    waiting = batcher()
    waiting.offer("small", 0, now=0.0)
    left = []
    for turn in range(1, 5):
        for item in range(SIZE):
            waiting.offer("busy", item, now=turn * 0.040)
        batch = waiting.flush_due(turn * 0.040, runner_free=False)
        assert batch is not None
        left.append(batch.partition)
    assert left == ["busy", "small", "busy", "busy"]


def test_each_partition_has_its_own_policy() -> None:
    waiting: Batcher[str, int] = Batcher({"slow": StaticPolicy(4, 50), "quick": GreedyPolicy(4)}.__getitem__)
    waiting.offer("slow", 1, now=0.0)
    waiting.offer("quick", 2, now=0.0)
    assert waiting.flush_due(now=0.0) == Batch("quick", [2])
    assert waiting.flush_due(now=0.0) is None


def test_empty_batcher_has_nothing_due() -> None:
    waiting = batcher()
    assert waiting.next_flush_at() == NEVER
    assert waiting.flush_due(now=1e9) is None
    assert waiting.drain() == []


def test_partitions_are_those_with_waiting_items() -> None:
    waiting = batcher()
    waiting.offer("a", 1, now=0.0)
    waiting.offer("b", 2, now=0.0)
    assert list(waiting) == ["a", "b"]
    waiting.flush_due(now=1.0)
    assert "a" not in waiting
    assert "b" in waiting
