"""Leases on a real server: who holds what, what runs out, and what goes back where."""

from __future__ import annotations

import pytest
import redis

from busload.tasks.leases import LEASE_S, RENEW_S, LeaseBook, Sweeper
from busload.workers.leases import MAX_BYTES, Leases

LISTS = ["pre:q", "pre:q\x06\x163", "pre:q\x06\x166", "pre:q\x06\x169"]
ANY = 10**6


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def book(client: redis.Redis) -> LeaseBook:
    return LeaseBook(client, "pre:")


def incarnation(client: redis.Redis, name: str = "w1", clock: Clock | None = None) -> Leases:
    return Leases(client, "pre:", name, clock or Clock())


def run_out(client: redis.Redis, name: str = "w1") -> None:
    """Let a lease be over, as if its time had passed."""
    assert client.zadd("pre:busload:1:leases", {name: 1}, xx=True, ch=True) == 1


def take(leases: Leases, at_most: int = 100) -> list[bytes]:
    _, _, messages = leases.move(LISTS, at_most=at_most, seen_drained=-1, full_depth=1)
    return [text for _, text in messages]


def test_messages_are_moved_most_urgent_first_and_oldest_first(client: redis.Redis, book: LeaseBook) -> None:
    client.lpush(LISTS[3], "late 1", "late 2")
    client.lpush(LISTS[0], "urgent 1", "urgent 2")
    leases = incarnation(client)
    assert take(leases, at_most=3) == [b"urgent 1", b"urgent 2", b"late 1"]
    (holder,) = book.holders()
    assert (holder.incarnation, holder.messages) == ("w1", 3)
    assert 0 < holder.ends_in_s <= LEASE_S
    assert len(leases.tags) == 3
    assert client.llen(LISTS[3]) == 1


def test_tags_are_new_for_every_delivery(client: redis.Redis) -> None:
    client.lpush(LISTS[0], "a", "b")
    first, second = incarnation(client, "w1"), incarnation(client, "w2")
    take(first)
    tags = set(first.tags)
    first.hand_back(tags)
    take(second)
    assert len(second.tags) == 2
    assert tags.isdisjoint(second.tags)


def test_nothing_is_taken_when_others_have_drained_since(client: redis.Redis) -> None:
    client.lpush(LISTS[0], *range(10))
    first, second = incarnation(client, "w1"), incarnation(client, "w2")
    take(first, at_most=4)
    assert second.move(LISTS, at_most=10, seen_drained=0, full_depth=64) == (6, 4, [])
    depth, drained, messages = second.move(LISTS, at_most=10, seen_drained=4, full_depth=64)
    assert (depth, drained, len(messages)) == (0, 10, 6)


def test_a_full_batch_is_taken_whoever_has_drained(client: redis.Redis) -> None:
    client.lpush(LISTS[0], *range(10))
    take(incarnation(client, "w1"), at_most=2)
    _, _, messages = incarnation(client, "w2").move(LISTS, at_most=8, seen_drained=0, full_depth=8)
    assert len(messages) == 8


def test_one_move_is_bounded_by_bytes(client: redis.Redis) -> None:
    size = MAX_BYTES // 4
    for number in range(20):
        client.lpush(LISTS[0], str(number).encode() * size)
    taken = take(incarnation(client))
    assert MAX_BYTES <= sum(map(len, taken)) <= 4 * MAX_BYTES
    client.flushall()


def test_a_lease_that_ran_out_is_swept_byte_for_byte_and_in_order(client: redis.Redis, book: LeaseBook) -> None:
    messages = [b"1:2:3", b"\x00\xff\n", b"", b'{"a": "b"}', "“ü”".encode()]
    client.lpush(LISTS[0], *messages)
    client.lpush(LISTS[1], "later")
    client.set("untouched", "x")
    take(incarnation(client))
    assert book.sweep() == {}
    run_out(client)
    assert book.sweep() == {"w1": 6}
    assert client.lrange(LISTS[0], 0, -1)[::-1] == messages
    assert client.lrange(LISTS[1], 0, -1) == [b"later"]
    assert book.holders() == []
    assert client.hgetall("pre:busload:1:drained") == {LISTS[0].encode(): b"0", LISTS[1].encode(): b"0"}


def test_what_was_swept_goes_before_what_came_since(client: redis.Redis, book: LeaseBook) -> None:
    client.lpush(LISTS[0], "old 1", "old 2")
    take(incarnation(client))
    client.lpush(LISTS[0], "new")
    run_out(client)
    book.sweep()
    assert take(incarnation(client, "w2")) == [b"old 1", b"old 2", b"new"]


def test_a_sweep_takes_nothing_from_the_living(client: redis.Redis, book: LeaseBook) -> None:
    client.lpush(LISTS[0], *range(4))
    living, dead = incarnation(client, "living"), incarnation(client, "dead")
    take(living, at_most=2)
    take(dead, at_most=2)
    run_out(client, "dead")
    assert book.sweep() == {"dead": 2}
    assert living.still_held(living.tags) == living.tags
    assert dead.still_held(dead.tags) == set()


def test_two_workers_of_one_name_hold_their_own(client: redis.Redis, book: LeaseBook) -> None:
    from busload.workers.leases import new_incarnation

    one, two = new_incarnation("same@host"), new_incarnation("same@host")
    assert one != two
    client.lpush(LISTS[0], "a", "b")
    first, second = incarnation(client, one), incarnation(client, two)
    assert take(first, at_most=1) + take(second, at_most=1) == [b"a", b"b"]
    book.take_back(one)
    assert second.still_held(second.tags) == second.tags


def test_renewal_holds_off_the_sweep_and_does_not_revive(client: redis.Redis, book: LeaseBook) -> None:
    client.lpush(LISTS[0], "a")
    leases = incarnation(client)
    take(leases)
    run_out(client)
    leases.renew()
    assert book.sweep() == {}
    run_out(client)
    book.sweep()
    leases.renew()
    assert leases.in_doubt
    assert leases.reconcile() == []
    assert (leases.tags, len(leases.lost), leases.in_doubt) == (set(), 1, False)
    assert book.holders() == []


def test_a_stall_beyond_the_lease_raises_doubt_even_when_a_move_renews_it(client: redis.Redis, book: LeaseBook) -> None:
    clock = Clock()
    client.lpush(LISTS[0], "a", "b")
    leases = incarnation(client, clock=clock)
    take(leases, at_most=1)
    (old,) = leases.tags
    clock.now += LEASE_S + 1
    assert leases.has_lapsed()
    run_out(client)
    book.sweep()
    take(leases, at_most=1)
    assert leases.in_doubt
    leases.reconcile()
    assert leases.lost == {old}
    assert len(leases.tags) == 1


def test_messages_of_a_move_whose_reply_was_lost_are_found(client: redis.Redis) -> None:
    client.lpush(LISTS[0], "a", "b", "c")
    take(incarnation(client), at_most=2)  # as another process of the same name: its reply never came
    leases = incarnation(client)
    take(leases, at_most=1)
    assert [text for _, text in leases.reconcile()] == [b"a", b"b"]
    assert len(leases.tags) == 3


def test_an_incarnation_that_ends_gives_everything_back(client: redis.Redis, book: LeaseBook) -> None:
    client.lpush(LISTS[0], "a", "b")
    leases = incarnation(client)
    take(leases)
    leases.end()
    assert client.lrange(LISTS[0], 0, -1) == [b"b", b"a"]
    assert (book.holders(), leases.tags) == ([], set())


def test_scripts_are_sent_again_to_a_server_that_forgot_them(client: redis.Redis) -> None:
    client.lpush(LISTS[0], "a", "b")
    leases = incarnation(client)
    take(leases, at_most=1)
    client.script_flush()
    assert take(leases, at_most=1) == [b"b"]


def test_after_a_pause_of_the_server_the_living_may_renew_first(client: redis.Redis, book: LeaseBook) -> None:
    clock = Clock()
    client.lpush(LISTS[0], "a")
    take(incarnation(client))
    run_out(client)
    sweeper = Sweeper(book, clock)
    sweeper.sweep()
    assert len(book.holders()) == 1  # it has only just come to know the server
    clock.now += 3 * RENEW_S
    sweeper.sweep()
    assert len(book.holders()) == 1  # it has not reached the server for a while, nor may the others have
    clock.now += RENEW_S
    sweeper.sweep()
    assert book.holders() == []
