import os
import uuid
from concurrent.futures import ThreadPoolExecutor

from hypothesis import given
from hypothesis import strategies as st

from busload.api.ids import mint, minted_at_ms

KEY = bytes(range(32))
NOW_MS = 1_764_500_000_000

keys = st.binary(min_size=32, max_size=32)
times_ms = st.integers(0, (1 << 48) - 1)


@given(keys, times_ms)
def test_an_id_tells_when_it_was_minted(key: bytes, now_ms: int) -> None:
    assert minted_at_ms(key, mint(key, now_ms)) == now_ms


@given(keys, times_ms)
def test_an_id_is_a_version_8_uuid_that_starts_with_its_time(key: bytes, now_ms: int) -> None:
    parsed = uuid.UUID(mint(key, now_ms))
    assert parsed.version == 8
    assert parsed.variant == uuid.RFC_4122
    assert parsed.int >> 80 == now_ms


@given(times_ms, st.integers(0, 127))
def test_no_bit_can_be_changed(now_ms: int, bit: int) -> None:
    changed = uuid.UUID(int=uuid.UUID(mint(KEY, now_ms)).int ^ 1 << bit)
    assert minted_at_ms(KEY, str(changed)) is None


@given(st.uuids() | st.text(max_size=64))
def test_other_strings_were_not_minted(value: object) -> None:
    assert minted_at_ms(KEY, str(value)) is None


@given(keys.filter(lambda key: key != KEY))
def test_an_id_of_another_key_was_not_minted(key: bytes) -> None:
    assert minted_at_ms(KEY, mint(key, NOW_MS)) is None


def test_other_spellings_of_a_minted_id_were_not_minted() -> None:
    task_id = mint(KEY, NOW_MS)
    for spelling in (task_id.upper(), f"{{{task_id}}}", f"urn:uuid:{task_id}", task_id.replace("-", "")):
        assert spelling == task_id or minted_at_ms(KEY, spelling) is None


def test_ids_of_one_millisecond_differ_beyond_the_counter() -> None:
    count = (1 << 16) + 100
    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(lambda _: mint(KEY, NOW_MS), range(count)))) == count


def test_a_forked_process_does_not_repeat_its_parent() -> None:
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(write_end, mint(KEY, NOW_MS).encode())
        os._exit(0)
    os.waitpid(child, 0)
    os.close(write_end)
    with open(read_end, "rb") as pipe:
        assert pipe.read().decode() != mint(KEY, NOW_MS)
