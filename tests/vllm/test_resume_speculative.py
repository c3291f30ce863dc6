"""Requests go on from their journals on vLLM with speculative decoding, where no logits processor sees the drafts."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest

from omni_actors.errors import TemporarilyRefused
from omni_actors.stages.base import StageOutput
from omni_actors.stages.vllm.decided import entries
from tests.support.engine_driver import Driver
from tests.vllm.split_model import ARGS, save
from tests.vllm.test_resume import answer, assert_idle, decoded, left_out, sampling_of, tokens_in

ASKED = {"messages": [{"role": "user", "content": "one two three " * 6}]}
GREEDY: dict[str, Any] = {"max_tokens": 24, "ignore_eos": True, "allowed_token_ids": [70, 71, 72]}
"""The answer repeats itself, so drafts are accepted."""
SAMPLED: dict[str, Any] = {**GREEDY, "temperature": 1.0, "seed": 5}
N = 3


@pytest.fixture(scope="module")
def driver(open_stage: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Driver]:
    args = {
        **ARGS,
        "logits_processors": [],
        "enable_prompt_embeds": False,
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3},
        "logprobs_mode": "processed_logprobs",
    }
    with closing(open_stage("vllm", save(tmp_path_factory.mktemp("tiny")), engine_args=args)) as engine:
        yield Driver(engine)
    # Drafts have numba imported. vLLM looks at all modules when the next engine opens, and fails at one of llvmlite.
    sys.modules.pop("llvmlite.binding.ffi", None)


def text_of(outputs: list[StageOutput]) -> str:
    return "".join(output.data.get("text", "") for output in outputs)


def tokens_of(params: dict[str, Any], outputs: list[StageOutput]) -> list[int]:
    journal = [output.decisions for output in outputs]
    return [token for entry in entries(journal, sampling_of(params)) for token in entry.tokens]


def ends(outputs: list[StageOutput]) -> list[Any]:
    return [{**output.data, "text": "", "logprobs": None} for output in outputs if "finish_reason" in output.data]


def check(driver: Any, params: dict[str, Any], *, equal: bool = True) -> list[StageOutput]:
    """Cut an answer behind each of its outputs. equal: whether what follows has to be the same."""
    whole = answer(driver, params, asked=ASKED)
    for cut in range(1, len(whole) + 1):
        journal = [output.decisions for output in whole[:cut]]
        before = decoded(driver)
        resumed = answer(driver, params, journal, asked=ASKED)
        assert [(each.data, each.decisions) for each in resumed[:cut]] == [
            (each.data, each.decisions) for each in whole[:cut]
        ]
        assert resumed[-1].last
        if equal or cut == len(whole):
            assert tokens_of(params, resumed) == tokens_of(params, whole)
            assert text_of(resumed) == text_of(whole)
            assert ends(resumed) == ends(whole)
        assert decoded(driver) - before == resumed[-1].data["completion_tokens"] - tokens_in(params, journal)
        assert_idle(driver)
    return whole


@pytest.mark.parametrize("name", ["plain", "tokens", "intervals", "penalized", "stop", "structured", "logprobs"])
def test_a_greedy_answer_is_the_same_answer(driver: Driver, name: str) -> None:
    text = text_of(answer(driver, GREEDY, asked=ASKED))
    more: dict[str, dict[str, Any]] = {
        "plain": {},
        "tokens": {"detokenize": False},
        "intervals": {"stream_interval": 5},
        "penalized": {"frequency_penalty": 0.1},
        "stop": {"stop": [text[len(text) // 2 :][:6]]},
        "structured": {"structured_outputs": {"regex": "(ab|c){8}"}, "allowed_token_ids": None, "ignore_eos": False},
        "logprobs": {"logprobs": 2, "prompt_logprobs": 1},
    }
    whole = check(driver, {**GREEDY, **more[name]})
    drafts = max(tokens_in({**GREEDY, **more[name]}, [output.decisions]) for output in whole) - 1
    assert drafts > 0, "a draft was accepted"


def test_a_sampled_answer_goes_on_as_one_that_may_be_drawn(driver: Driver) -> None:
    """Which random numbers were drawn for the drafts is not known, so what follows may be another answer."""
    check(driver, SAMPLED, equal=False)


def test_several_answers_go_on(driver: Driver) -> None:
    params = {**SAMPLED, "n": N, "temperature": 0.3}
    whole = answer(driver, params, asked=ASKED)
    ended = [at for at, output in enumerate(whole, 1) if "finish_reason" in output.data]
    assert len(ended) == N
    for cut in range(1, len(whole) + 1):
        journal = [output.decisions for output in whole[:cut]]
        resumed = answer(driver, params, journal, asked=ASKED)
        assert [(each.data, each.decisions) for each in resumed[:cut]] == [
            (each.data, each.decisions) for each in whole[:cut]
        ]
        assert sorted(each["index"] for each in ends(resumed)) == [*range(N)]
        assert [output.last for output in resumed] == [False] * (len(resumed) - 1) + [True]
        assert resumed[-1].data["completion_tokens"] == sum(len(output.decisions) - 1 for output in resumed)
        assert_idle(driver)
        assert cut < len(whole) or [output.data for output in resumed] == [output.data for output in whole]


def test_a_request_whose_tokens_vllm_would_have_to_decide_again_is_refused(driver: Driver) -> None:
    """The log probabilities of the journal did not fit."""
    for more in ({"logprobs": 1}, {"prompt_logprobs": 1}):
        params = {**GREEDY, **more}
        whole = answer(driver, params, asked=ASKED)
        journal = left_out(params, [output.decisions for output in whole[:9]])
        with pytest.raises(TemporarilyRefused, match="not resumed") as refused:
            answer(driver, params, journal, asked=ASKED)
        assert refused.value.code == "not_resumed"
        driver.live.discard(1)
        assert_idle(driver)
        resumed = answer(driver, params, journal, needed_from=9, asked=ASKED)
        assert text_of(resumed) == text_of(whole)
        assert_idle(driver)
