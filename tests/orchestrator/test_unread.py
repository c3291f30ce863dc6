"""The accounts of unread output: which requests are paused, wait for their readers, or are ended."""

from __future__ import annotations

import math
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_actors.config import Limits
from omni_actors.orchestrator.unread import RATE_GRACE_S, ROOM_GRACE_S, SMALL_BYTES, Account, ReaderKind, Unread

KIB = 1024
LIMITS = Limits(window_bytes=256 * KIB, unread_bytes=4096 * KIB, read_bytes_s=4096.0)


def opened(unread: Unread, count: int, reader: ReaderKind = "caller") -> list[Account]:
    accounts = [Account(reader) for _ in range(count)]
    for account in accounts:
        unread.open(account)
    return accounts


@pytest.fixture
def unread() -> Unread:
    return Unread(LIMITS)


def test_a_library_caller_has_a_piece_when_it_is_returned(unread: Unread) -> None:
    [account] = opened(unread, 1)
    unread.arrive(account, 100, 0.0)
    assert unread.total == account.charged == 100
    unread.read(account, 100, 0.0)
    assert unread.total == account.charged == 0


def test_a_piece_of_a_stream_is_undelivered_until_its_reader_asks_for_the_next(unread: Unread) -> None:
    [account] = opened(unread, 1, "stream")
    unread.arrive(account, 100, 0.0)
    unread.arrive(account, 10, 0.0)
    unread.read(account, 100, 0.0)
    assert unread.total == 110
    unread.ask(account, 0.0)
    assert unread.total == 10


def test_a_whole_answer_is_charged_until_it_is_released(unread: Unread) -> None:
    [account] = opened(unread, 1, "whole")
    for _ in range(2):
        unread.arrive(account, 100, 0.0)
        unread.read(account, 100, 0.0)
        unread.ask(account, 0.0)
    assert unread.total == 200
    unread.deliver(account, 150, 0.0)
    assert unread.total == 50
    unread.deliver(account, 150, 0.0)
    assert unread.total == account.charged == 0, "no more than there was"


def test_a_full_window_pauses_until_half_of_it_is_read(unread: Unread) -> None:
    [account] = opened(unread, 1, "stream")
    assert unread.arrive(account, 256 * KIB, 0.0) == []
    assert unread.arrive(account, 1, 0.0) == [account]
    assert account.paused
    assert unread.arrive(account, 10 * KIB, 0.0) == [], "a change is reported once"
    unread.read(account, 100 * KIB, 0.0)
    assert unread.ask(account, 0.0) == []
    unread.read(account, 100 * KIB, 0.0)
    assert account.paused, "the piece is undelivered"
    assert unread.ask(account, 0.0) == [account]
    assert not account.paused


def test_a_whole_answer_has_no_window(unread: Unread) -> None:
    [account] = opened(unread, 1, "whole")
    assert unread.arrive(account, 1024 * KIB, 0.0) == []


def test_a_library_caller_has_no_window(unread: Unread) -> None:
    [account] = opened(unread, 1)
    assert unread.arrive(account, 1024 * KIB, 0.0) == []
    assert account.waiting_since is None


def test_under_pressure_all_whole_answers_but_the_first_large_one_are_paused(unread: Unread) -> None:
    streams, answers = opened(unread, 2, "stream"), opened(unread, 3, "whole")
    unread.arrive(streams[0], 100 * KIB, 0.0)
    unread.arrive(streams[1], SMALL_BYTES, 0.0)
    unread.arrive(answers[0], SMALL_BYTES, 0.0)
    unread.arrive(answers[1], 100 * KIB, 0.0)
    assert unread.arrive(answers[2], 2048 * KIB, 0.0) == [streams[0], answers[2]]
    assert streams[0].waiting_since == 0.0
    assert answers[2].waiting_since is None, "it waits for another answer, not for its reader"
    unread.end(answers[1], 0.0)
    unread.close(answers[1], 0.0)
    assert unread.total > 1024 * KIB, "the pressure lasts"
    assert not answers[2].paused, "the next one runs"
    assert unread.close(answers[2], 0.0) == [streams[0]]


def test_a_library_caller_is_not_paused_under_pressure(unread: Unread) -> None:
    """It may read several answers in any order, so that pausing one for another could block both for ever."""
    [caller], [stream] = opened(unread, 1), opened(unread, 1, "stream")
    unread.arrive(caller, 2048 * KIB, 0.0)
    assert unread.arrive(stream, 100 * KIB, 0.0) == [stream]
    assert not caller.paused


def test_pressure_begins_above_half_of_the_limit_and_lasts_above_a_quarter(unread: Unread) -> None:
    [caller], [stream] = opened(unread, 1), opened(unread, 1, "stream")
    unread.arrive(stream, 100 * KIB, 0.0)
    assert unread.arrive(caller, 1948 * KIB, 0.0) == []
    assert unread.arrive(caller, 1, 0.0) == [stream]
    assert unread.read(caller, 1024 * KIB, 0.0) == []
    assert unread.read(caller, 1, 0.0) == [stream]
    assert not stream.paused


def test_pressure_ends_at_a_quarter_of_the_limit(unread: Unread) -> None:
    first, second = opened(unread, 2, "whole")
    unread.arrive(first, 1000 * KIB, 0.0)
    unread.arrive(second, 1100 * KIB, 0.0)
    assert second.paused
    assert unread.arrive(first, 100 * KIB, 0.0) == []
    unread.end(first, 0.0)
    assert not second.paused, "a complete answer lets the next one run"
    unread.close(first, 0.0)
    [third] = opened(unread, 1, "stream")
    assert unread.arrive(third, 100 * KIB, 0.0) == [third], "1100 KiB are more than a quarter"
    unread.close(second, 0.0)
    assert not third.paused


def test_the_rate_is_measured_from_the_beginning_of_the_wait(unread: Unread) -> None:
    [account] = opened(unread, 1, "stream")
    unread.arrive(account, 200 * KIB, 0.0)
    unread.read(account, 100 * KIB, 1.0)
    unread.ask(account, 2.0)
    assert account.rate(5.0) == 0.0, "it does not wait for its reader"
    unread.arrive(account, 200 * KIB, 10.0)
    assert (account.waited_s(12.0), account.rate(12.0)) == (2.0, 0.0)
    unread.read(account, 4 * KIB, 13.0)
    unread.ask(account, 14.0)
    assert account.rate(14.0) == 1024.0
    unread.read(account, 200 * KIB, 15.0)
    unread.ask(account, 16.0)
    assert (account.waited_s(17.0), account.rate(17.0)) == (0.0, 0.0), "the wait is over"


def test_a_connection_below_the_minimum_rate_is_too_slow(unread: Unread) -> None:
    [account] = opened(unread, 1, "stream")
    assert unread.too_slow_at(account) == math.inf
    unread.arrive(account, 300 * KIB, 5.0)
    assert unread.too_slow_at(account) == math.inf, "the reader does not wait for its connection"
    account.sending = True
    assert unread.too_slow_at(account) == 5.0 + RATE_GRACE_S
    unread.read(account, 80 * KIB, 6.0)
    assert unread.too_slow_at(account) == 5.0 + 20.0, "the undelivered piece may be on its way"
    unread.ask(account, 7.0)
    assert unread.too_slow_at(account) == 5.0 + 20.0
    unread.read(account, 220 * KIB, 8.0)
    unread.ask(account, 9.0)
    assert unread.too_slow_at(account) == math.inf, "the stages lag behind, not the connection"


def test_of_a_whole_answer_only_what_was_sent_counts_as_read(unread: Unread) -> None:
    [account] = opened(unread, 1, "whole")
    unread.arrive(account, 100 * KIB, 0.0)
    unread.read(account, 100 * KIB, 0.0)
    unread.end(account, 5.0)
    account.sending = True
    assert unread.too_slow_at(account) == 5.0 + RATE_GRACE_S
    unread.deliver(account, 80 * KIB, 6.0)
    assert unread.too_slow_at(account) == 5.0 + 20.0


def test_the_slowest_reader_is_found_among_long_waits_for_large_output(unread: Unread) -> None:
    slow, slower, fresh, small, running = opened(unread, 5, "stream")
    for account, size in ((slow, 300), (slower, 300), (small, 60), (running, 200)):
        unread.arrive(account, size * KIB, 0.0)
    unread.end(small, 0.0)
    unread.arrive(fresh, 300 * KIB, 2.0)
    for account, size in ((slow, 2 * KIB), (slower, 1 * KIB)):
        unread.read(account, size, 1.0)
        unread.ask(account, 1.0)
    assert not unread.slow(ROOM_GRACE_S - 0.1)
    assert unread.slow(ROOM_GRACE_S)[0] is slower
    unread.close(slower, 3.0)
    assert unread.slow(ROOM_GRACE_S)[0] is slow
    unread.close(slow, 3.0)
    assert not unread.slow(ROOM_GRACE_S)


def test_a_complete_answer_waits_for_its_reader_without_a_full_window(unread: Unread) -> None:
    [account] = opened(unread, 1)
    unread.arrive(account, 100 * KIB, 0.0)
    unread.end(account, 1.0)
    assert account.waiting_since == 1.0
    assert unread.slow(1.0 + ROOM_GRACE_S)[0] is account
    unread.read(account, 100 * KIB, 2.0)
    assert account.waiting_since is None, "its reader has everything"


def test_a_request_that_has_ended_is_not_counted_as_paused(unread: Unread) -> None:
    account, _ = opened(unread, 2, "stream")
    unread.arrive(account, 300 * KIB, 0.0)
    assert unread.paused == 1
    unread.end(account, 0.0)
    assert unread.paused == 0


@pytest.mark.parametrize("is_over", [False, True])
def test_a_paced_reader_is_not_ended_to_make_room_and_is_bounded_in_all_else(unread: Unread, is_over: bool) -> None:
    paced, stream = opened(unread, 1, "paced") + opened(unread, 1, "stream")
    assert unread.arrive(paced, 300 * KIB, 0.0) == [paced], "it has a window"
    if is_over:
        unread.end(paced, 0.0)
    assert not unread.slow(ROOM_GRACE_S)
    unread.arrive(stream, 300 * KIB, ROOM_GRACE_S)
    unread.read(stream, 1 * KIB, ROOM_GRACE_S)
    unread.ask(stream, ROOM_GRACE_S)
    assert unread.slow(2 * ROOM_GRACE_S)[0] is stream, "though it is the faster one"
    assert unread.victim(2 * ROOM_GRACE_S) is paced, "memory is bounded"
    paced.sending = True
    assert unread.too_slow_at(paced) == RATE_GRACE_S, "a connection that takes nothing is too slow"


def test_past_the_total_the_largest_small_request_ends() -> None:
    unread = Unread(Limits(unread_bytes=1000))
    accounts = opened(unread, 3)
    for i, account in enumerate(accounts):
        unread.arrive(account, 300 + i, 0.0)
    unread.arrive(accounts[0], 97, 0.0)
    assert not unread.exceeded, "1000 bytes are allowed"
    unread.arrive(accounts[0], 1, 0.0)
    assert unread.exceeded
    assert unread.victim(0.0) is accounts[0]


def test_past_the_total_a_request_that_waits_for_its_reader_ends_first(unread: Unread) -> None:
    [caller], [stream] = opened(unread, 1), opened(unread, 1, "stream")
    unread.arrive(stream, 300 * KIB, 0.0)
    unread.arrive(caller, 4000 * KIB, 0.0)
    assert unread.exceeded
    assert unread.victim(0.0) is stream, "the other one is larger"
    unread.close(stream, 0.0)
    assert unread.victim(0.0) is caller


def test_closing_an_account_twice_frees_its_charge_once(unread: Unread) -> None:
    first, second = opened(unread, 2, "stream")
    unread.arrive(first, 300 * KIB, 0.0)
    unread.arrive(second, 300 * KIB, 0.0)
    for _ in range(2):
        unread.close(first, 0.0)
        assert (unread.total, first.charged, unread.paused) == (300 * KIB, 0, 1)


@given(st.data())
def test_counts_equal_a_recount_and_one_whole_answer_always_runs(data: st.DataObject) -> None:
    """In any order of events, at least one of the unfinished whole answers is not paused."""
    unread = Unread(Limits(window_bytes=128 * KIB, unread_bytes=1024 * KIB))
    accounts = [
        account for reader in get_args(ReaderKind) for account in opened(unread, 3 if reader == "whole" else 2, reader)
    ]
    for now in range(data.draw(st.integers(0, 40))):
        account = data.draw(st.sampled_from(accounts))
        match data.draw(st.sampled_from(("arrive", "read", "ask", "end", "close"))):
            case "arrive" if not account.ended:
                unread.arrive(account, data.draw(st.integers(1, 300 * KIB)), now)
            case "read" if account.queued:
                unread.read(account, data.draw(st.integers(1, account.queued)), now)
            case "ask":
                unread.ask(account, now)
            case "end":
                unread.end(account, now)
            case "close":
                unread.close(account, now)
                accounts.remove(account)
        assert [*unread._accounts] == accounts, "closed ones are forgotten"
        assert unread.total == sum(account.charged for account in accounts)
        large = [account for account in accounts if account.charged > SMALL_BYTES]
        assert unread.places == sum(account.ended for account in large)
        waiting = [account for account in large if account.waiting_since is not None]
        unpaced = [account for account in waiting if account.reader != "paced"]
        slow = unread.slow(now + ROOM_GRACE_S)
        assert {*slow} == {*unpaced}
        assert [each.rate(now + ROOM_GRACE_S) for each in slow] == sorted(
            each.rate(now + ROOM_GRACE_S) for each in slow
        )
        running = [account for account in accounts if account.reader == "whole" and not account.ended]
        assert not running or not all(account.paused for account in running)
        assert all(account.charged > 0 for account in accounts if account.paused)
        if not accounts:
            return
        assert unread.victim(now) in (waiting or accounts)


def test_under_pressure_a_piece_changes_no_account_but_its_own(unread: Unread, monkeypatch: pytest.MonkeyPatch) -> None:
    """So its cost does not grow with the requests in flight."""
    opened(unread, 1000, "stream")
    answers = opened(unread, 3, "whole")
    for answer in answers:
        unread.arrive(answer, 1000 * KIB, 0.0)
    looked: list[Account] = []
    monkeypatch.setattr(Unread, "_file", lambda self, account: looked.append(account))
    for answer in answers:
        unread.arrive(answer, 1, 0.0)
    assert len(looked) <= 2 * len(answers), "its own, and that of the answer that runs"
