"""A request's input: which pieces each stage is sent, and what is retained of live input for a replay."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

import pytest

from omni_actors.config import Limits
from omni_actors.orchestrator.pieces import Input, Segments
from omni_actors.orchestrator.request_input import RequestInput, RetainedInput

LIMITS = Limits(retain_bytes=100, worker_retain_bytes=150)
OF_ONE = "more than 100 bytes of its input have arrived (limits.retain_bytes)"
OF_ALL = "the input of all requests exceeds 150 bytes (limits.worker_retain_bytes)"


async def nothing() -> AsyncIterator[Input]:
    return
    yield


def live(*first: Input) -> Segments:
    return Segments(source=nothing(), to_piece=lambda piece: piece, first=first)


def piece(name: str) -> Input:
    return Input({"name": name})


def send(given: RequestInput, stage: str) -> list[tuple[str, bool]]:
    """Send a stage all that has arrived for it. Return the names of the pieces, "" for the end, and which is last."""
    sent = []
    while (due := given.next_piece(stage)) is not None:
        sent.append((due[0].data.get("name", ""), due[1]))
        given.cursor(stage).position += 1
        given.cursor(stage).sent += 1
        if due[1]:
            break
    given.take_due(stage)
    return sent


@pytest.fixture
def retained() -> RetainedInput:
    return RetainedInput(LIMITS)


def test_each_stage_is_sent_the_pieces_of_its_kinds(retained: RetainedInput) -> None:
    fixed = {"a": [piece("a0"), piece("a1")], "b": [piece("b0")]}
    given = RequestInput(
        {**fixed, "c": live(piece("c0"))}, {"s": ("a",), "t": ("a", "b"), "u": ("b", "c"), "v": ("c",)}
    )
    assert send(given, "s") == [("a0", False), ("a1", True)]
    assert send(given, "t") == [("a0", False), ("a1", False), ("b0", True)]
    assert send(given, "u") == [("b0", False), ("c0", False)]
    given.append("c", piece("c1"), 10, retained)
    assert given.due == ("u", "v")
    assert send(given, "u") == [("c1", False)]
    given.end("c")
    assert given.due == ("v", "u")
    assert send(given, "u") == [("", True)]
    assert send(given, "v") == [("c0", False), ("c1", False), ("", True)]
    assert given.all_sent
    given.restart("u")
    assert given.due == ("u",)
    assert send(given, "u") == [("b0", False), ("c0", False), ("c1", False), ("", True)]
    given.restart("u")
    given.close(retained)
    assert (given.all_sent, given.next_piece("u"), given.fixed) == (True, None, {})
    assert retained.nbytes == 0


def test_live_input_ends_when_all_of_its_kinds_have(retained: RetainedInput) -> None:
    given = RequestInput({"a": live(), "b": live()}, {"s": ("a", "b")})
    given.end("a")
    assert (given.due, send(given, "s"), given.live_arrived) == ((), [], False)
    given.append("b", piece("b0"), 10, retained)
    assert given.live_arrived
    given.end("b")
    assert send(given, "s") == [("b0", False), ("", True)]


def arrive(given: RequestInput, sizes: Sequence[int], retained: RetainedInput) -> None:
    for size in sizes:
        given.append("a", piece(""), size, retained)


def test_input_is_evicted_above_the_bound_of_one_request(retained: RetainedInput) -> None:
    given = RequestInput({"a": live()}, {"s": ("a",), "t": ("a",)})
    arrive(given, [60, 40], retained)
    assert given.evicting is None
    arrive(given, [1], retained)
    assert given.evicting == OF_ONE
    send(given, "s")
    assert not given.drop_sent(["s", "t"], retained), "t was sent none of it"
    assert retained.nbytes == 101
    assert given.next_piece("t") is not None
    send(given, "t")
    assert given.drop_sent(["s", "t"], retained)
    assert retained.nbytes == 0
    arrive(given, [70], retained)
    assert given.drop_sent(["s", "t"], retained), "what was dropped stays lost"
    assert [send(given, stage) for stage in "st"] == [[("", False)]] * 2
    given.drop_sent(["s", "t"], retained)
    assert retained.nbytes == 0


def test_input_that_is_not_kept_does_not_count(retained: RetainedInput) -> None:
    """A request that is not replayed drops what was sent."""
    given = RequestInput({"a": live(piece("a0"))}, {"s": ("a",)})
    for _ in range(3):
        arrive(given, [60], retained)
        send(given, "s")
        assert given.drop_sent(["s"], retained)
        assert (retained.nbytes, given.evicting) == (0, None)


def test_input_is_evicted_above_the_bound_of_all_requests(retained: RetainedInput) -> None:
    first, second = (RequestInput({"a": live()}, {"s": ("a",)}) for _ in range(2))
    arrive(first, [75], retained)
    arrive(second, [75], retained)
    assert second.evicting is None
    arrive(second, [1], retained)
    assert (first.evicting, second.evicting) == (None, OF_ALL)
    arrive(second, [100], retained)
    assert second.evicting == OF_ALL, "the first reason stays"
    second.end("a")
    second.close(retained)
    assert retained.nbytes == 75
    arrive(first, [25], retained)
    assert first.evicting is None
    first.close(retained)
    assert retained.nbytes == 0
    assert first.next_piece("s") is None
