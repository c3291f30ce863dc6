"""The inputs of a talker's positions, without a model: which ones they are, and when they are ready."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from omni_actors.stages.base import Chunk, StageRequest
from omni_actors.stages.omni.options import TalkerParams
from omni_actors.stages.omni.talker_request import TalkerRequest

PREFIX, TEXT_EOS, TEXT_PAD, CODE = 100, 1000, 2000, 0.5


def rows(*values: float) -> Tensor:
    """(k, 1)."""
    return torch.tensor(values)[:, None]


@pytest.fixture
def request_() -> TalkerRequest:
    """Return a request with a prompt of three rows and a prefix of two."""
    made = TalkerRequest(StageRequest(1, ("thinker",), {}), TalkerParams(seed=1), torch.zeros(5, dtype=torch.bool))
    made.prompt_rows_left, made.prefix = 3, rows(PREFIX, PREFIX + 1)
    made.text_eos, made.text_pad = rows(TEXT_EOS), rows(TEXT_PAD)
    return made


def taken(request: TalkerRequest) -> list[float]:
    """Take all inputs that are ready."""
    return request.take(request.ready)[:, 0].tolist() if request.ready else []


def end(request: TalkerRequest) -> None:
    request.open.update(Chunk(source="thinker", seq=0, last=True, tensors={}, data={}))


def test_the_prefix_follows_the_last_prompt_row_and_the_first_token_completes_it(request_: TalkerRequest) -> None:
    request_.add_prompt(rows(1, 2))
    assert taken(request_) == [1, 2]
    request_.add_prompt(rows(3))
    assert taken(request_) == [3, PREFIX]
    request_.add_answer(rows(10, 11))
    assert taken(request_) == [10 + PREFIX + 1], "the second token waits for a code"


def test_a_position_needs_the_last_code_and_the_next_text(request_: TalkerRequest) -> None:
    request_.add_answer(rows(10))
    assert len(taken(request_)) == 1
    request_.code_input = rows(CODE)
    request_.advance()
    assert taken(request_) == [], "the text has not arrived"
    request_.add_answer(rows(11))
    request_.advance()
    assert taken(request_) == [CODE + 11]
    request_.add_answer(rows(12))
    request_.advance()
    assert taken(request_) == [], "the code is not chosen"


def test_behind_the_answer_come_its_end_and_padding(request_: TalkerRequest) -> None:
    request_.add_answer(rows(10))
    taken(request_)
    request_.text.append(request_.text_eos)
    end(request_)
    found = []
    for _ in range(3):
        request_.code_input = rows(CODE)
        request_.advance()
        found += taken(request_)
    assert found == [CODE + TEXT_EOS, CODE + TEXT_PAD, CODE + TEXT_PAD]


def test_decided_codes_are_followed_as_far_as_text_has_arrived(request_: TalkerRequest) -> None:
    request_.decided.extend(rows(0.25, 0.5, 0.75).split(1))
    request_.add_answer(rows(10, 11))
    request_.advance()
    assert taken(request_) == [10 + PREFIX + 1, 11 + 0.25]
    request_.add_answer(rows(12))
    request_.advance()
    assert taken(request_) == [12 + 0.5]
    end(request_)
    request_.advance()
    assert taken(request_) == [TEXT_PAD + 0.75]
    request_.advance()
    assert taken(request_) == [], "the next code is not decided"
