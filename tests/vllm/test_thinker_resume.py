"""A thinker on vLLM goes on from its journal: text, and rows for the talker, are those of the undisturbed answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from omni_actors.stages.base import StageOutput
from tests.support.closeness import assert_same_results
from tests.support.conformance import chunks
from tests.support.engine_cases import shown
from tests.vllm.test_resume import described, like, tokens_in

CONVERSATION: list[Any] = [({"messages": [{"role": "user", "content": "tell me a story about the sea . " * 40}]}, {})]
"""Its rows go in two chunks, before the answer."""
PARAMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "stop": {"stop": ["zzzz", "never said"]},
    "intervals": {"stream_interval": 4},
    "logprobs": {"logprobs": 1},
    "structure": {"structured_outputs": {"regex": "[a-z ]{12}"}},
}
TOKENS = 24
LEAD = 1e-4
"""By how much the log probability of a token must lead the next one's, so that no rounding changes it."""


@pytest.fixture(params=["qwen3", "qwen2_5"])
def driver(request: pytest.FixtureRequest, drive: Callable[..., Any]) -> Any:
    return drive(f"vllm_{request.param}_thinker")


def answer(driver: Any, asked: list[Any], outputs: list[StageOutput], **params: Any) -> list[StageOutput]:
    """outputs: behind which to go on."""
    journal = tuple(output.decisions for output in outputs)
    driver.start(1, journal=journal, **{"max_tokens": TOKENS, "ignore_eos": True, **params})
    for at, (data, tensors) in enumerate(asked):
        driver.feed(1, data, tensors, last=at == len(asked) - 1)
    found: list[StageOutput] = driver.run()[1]
    return found


def check(driver: Any, asked: list[Any], **params: Any) -> None:
    """Cut an answer in several places. vLLM decodes only the tokens of the journal's last output again."""
    whole = answer(driver, asked, [], **params)
    prompt = sum(not output.decisions for output in whole)
    for cut in (prompt, prompt + 1, len(whole) // 2, len(whole) - 1, len(whole)):
        before = driver.engine.gauges()["generation_tokens"]
        resumed = answer(driver, asked, whole[:cut], **params)
        assert [output.decisions for output in resumed[:cut]] == [output.decisions for output in whole[:cut]]
        assert [output.data for output in resumed[:cut]] == [output.data for output in whole[:cut]]
        assert described(resumed) == like(whole)
        assert_same_results(*([tensors for _, tensors, _ in chunks(each)] for each in (resumed, whole)))
        at_once = tokens_in(params, [output.decisions for output in whole[: max(0, cut - 1)]])
        decoded = driver.engine.gauges()["generation_tokens"] - before
        assert decoded == whole[-1].data["completion_tokens"] - at_once


@pytest.mark.parametrize("downstream", [True, False])
@pytest.mark.parametrize("name", PARAMS)
def test_a_resumed_answer_has_the_same_text_and_rows(driver: Any, name: str, downstream: bool) -> None:
    rows = [output.downstream["rows"] for output in answer(driver, CONVERSATION, []) if not output.decisions]
    assert len(rows) > 0, "a chunk of rows before the answer"
    leads = answer(driver, CONVERSATION, [], **{**PARAMS[name], "logprobs": 2, "downstream": False})
    tops = [sorted(each["logprob"] for each in found) for output in leads for found in output.data["logprobs"]]
    assert len(tops) == leads[-1].data["completion_tokens"]
    assert all(top[-1] - top[-2] > LEAD for top in tops) or name == "structure"
    check(driver, CONVERSATION, downstream=downstream, **PARAMS[name])


def test_a_resumed_answer_about_a_picture_has_the_same_text_and_rows(driver: Any) -> None:
    check(driver, shown(1))
