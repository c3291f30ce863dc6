"""Turns of a function and its caller."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from omni_actors.stages.diffusers.turns import Cancelled, Turns


def test_the_function_computes_only_while_its_caller_waits() -> None:
    computed: list[int] = []

    def work(hand_over: Callable[[int], None]) -> int:
        for number in range(3):
            computed.append(number)
            hand_over(number)
        return 3

    turns = Turns(work)
    for number in range(3):
        assert computed == list(range(number))
        assert turns.advance() == number
        assert not turns.done
    assert turns.advance() == 3
    assert turns.done


def test_what_the_function_raises_is_raised_by_advance() -> None:
    def work(hand_over: Callable[[int], None]) -> int:
        hand_over(1)
        raise ValueError("no")

    before = set(threading.enumerate())
    turns = Turns(work)
    turns.advance()
    with pytest.raises(ValueError, match="no"):
        turns.advance()
    assert turns.done
    assert set(threading.enumerate()) <= before  # an idle thread of other tests may end


@pytest.mark.parametrize("advanced", [0, 1])
def test_cancel_ends_the_function_where_it_waits(advanced: int) -> None:
    ended: list[str] = []

    def work(hand_over: Callable[[int], None]) -> int:
        try:
            for number in range(9):
                hand_over(number)
        except Exception:
            ended.append("taken for a failure")
            raise
        except Cancelled:
            ended.append("cancelled")
            raise
        return 9

    before = set(threading.enumerate())
    turns = Turns(work)
    for _ in range(advanced):
        turns.advance()
    turns.cancel()
    assert ended == ["cancelled"] * advanced
    assert set(threading.enumerate()) <= before  # an idle thread of other tests may end
