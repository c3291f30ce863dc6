"""Log probabilities in the journals of the vllm engines."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from omni_actors.errors import TemporarilyRefused
from omni_actors.stages.vllm.logprobs import from_numbers, to_numbers
from tests.support.engine_driver import Driver
from tests.vllm.split_model import ARGS, save
from tests.vllm.test_resume import OWN, answer, decoded, described, left_out, like


@pytest.mark.parametrize("value", [-0.1 - 2**-52, -0.0, 5e-324, math.inf, -math.inf, math.nan])
def test_each_value_comes_out_of_a_journal_as_it_was(value: float) -> None:
    tokens = [{"token_id": 151_000, "logprob": value, "rank": None, "token": None}]
    tokens += [{"token_id": 3, "logprob": -1.5, "rank": 150_000, "token": "\ufffd\0é"}]
    for data in ({}, {"logprobs": [tokens, tokens[1:]]}, {"logprobs": [tokens], "prompt_logprobs": [None, tokens]}):
        found = from_numbers(to_numbers({**data, "text": "other data"}))
        assert repr(found) == repr(data)


def test_log_probabilities_of_possible_tokens_alone_are_put_out_again(
    open_stage: Callable[..., Any], tmp_path: Path
) -> None:
    """With ``processed_logprobs``, the other tokens have minus infinity, as those of a token that is decided again."""
    args = {**ARGS, "enable_prompt_embeds": False, "logprobs_mode": "processed_logprobs"}
    params = {**OWN, "seed": 5, "top_k": 2, "logprobs": 3, "ignore_eos": True}
    with closing(open_stage("vllm", save(tmp_path), engine_args=args)) as engine:
        driver = Driver(engine)
        whole = answer(driver, params)
        values = [[found["logprob"] for found in output.data["logprobs"][0]] for output in whole]
        assert all(-math.inf in each and max(each) < 0 for each in values)
        journal = [output.decisions for output in whole[:6]]
        before = decoded(driver)
        resumed = answer(driver, params, journal)
        assert described(resumed)[:6] == described(whole)[:6]
        assert described(resumed) == like(whole)
        assert decoded(driver) - before == 6
        with pytest.raises(TemporarilyRefused, match="not resumed"):
            answer(driver, params, left_out(params, journal))
