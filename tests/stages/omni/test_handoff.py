"""The handoff from a thinker to its talker, without a model: every row goes once, in order, and not too early."""

from __future__ import annotations

import random
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from omni_actors.stages.omni.handoff import TalkerHandoff
from omni_actors.stages.tensors import to_torch

HEADER = {"ids": torch.arange(3)}


def rows(first: int, count: int) -> Tensor:
    """(count, 2): row i holds the number ``first`` + i."""
    return torch.arange(first, first + count, dtype=torch.float32)[:, None].expand(-1, 2)


def sent(taken: dict[str, Any]) -> list[int]:
    return to_torch(taken["rows"])[:, 0].int().tolist() if "rows" in taken else []


def test_the_header_goes_once_and_is_not_made_before_it_goes() -> None:
    made: list[int] = []

    def header() -> dict[str, Tensor]:
        made.append(1)
        return HEADER

    handoff = TalkerHandoff(4)
    assert made == []
    first = handoff.take(header)
    assert to_torch(first["ids"]).tolist() == [0, 1, 2]  # type: ignore[arg-type]
    assert handoff.take(header) == {}
    assert made == [1]


def test_a_tokens_row_waits_until_its_text_is_certain() -> None:
    handoff = TalkerHandoff(0)
    for token in range(3):
        handoff.add_token(rows(token, 1))
    assert sent(handoff.take(dict, certain_tokens=0)) == []
    assert sent(handoff.take(dict, certain_tokens=2)) == [0, 1]
    assert sent(handoff.take(dict, certain_tokens=2)) == []
    assert sent(handoff.take(dict, certain_tokens=3)) == [2]


def test_a_certain_token_whose_row_comes_a_step_later_goes_then() -> None:
    handoff = TalkerHandoff(0)
    handoff.add_token(rows(0, 1))
    assert sent(handoff.take(dict, certain_tokens=2)) == [0]
    handoff.add_token(rows(1, 1))
    assert sent(handoff.take(dict, certain_tokens=2)) == [1]


def test_prompt_rows_go_before_the_answers() -> None:
    handoff = TalkerHandoff(2)
    handoff.add_token(rows(10, 1))
    handoff.add_prompt(rows(0, 2))
    assert sent(handoff.take(dict, certain_tokens=1)) == [0, 1, 10]


def test_a_chunk_without_a_position_of_the_talkers_has_no_rows() -> None:
    handoff = TalkerHandoff(4, torch.tensor([False, False, True, True]))
    handoff.add_prompt(rows(0, 4))
    assert handoff.take(dict, prompt=2) == {}
    assert (handoff.waiting, handoff.taken) == (2, 2)
    assert sent(handoff.take(dict)) == [2, 3]


@given(st.none() | st.lists(st.booleans(), max_size=12), st.integers(0, 12), st.integers(0, 2**32))
def test_the_talker_gets_the_selected_rows_once_however_they_are_added_and_taken(
    selected: list[bool] | None, size: int, seed: int
) -> None:
    size = size if selected is None else len(selected)
    draw = random.Random(seed)  # each turn as a draw of Hypothesis takes ten times as long
    handoff = TalkerHandoff(size, None if selected is None else torch.tensor(selected, dtype=torch.bool))
    added, received = 0, []
    while handoff.taken < size:
        if added < size and draw.random() < 0.5:
            count = draw.randint(1, size - added)
            handoff.add_prompt(rows(added, count))
            added += count
        count = draw.randint(0, handoff.waiting)
        received += sent(handoff.take(dict, prompt=count))
        assert handoff.waiting + handoff.taken == added
    expected = range(size) if selected is None else [i for i in range(size) if selected[i]]
    assert received == list(expected)
