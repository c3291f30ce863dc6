"""A request that goes on from its journal on vLLM: as if nothing had happened."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from omni_actors.errors import TemporarilyRefused
from omni_actors.stages.base import CLIENT, Decisions, StageOutput, StageRequest

QUESTION = {"messages": [{"role": "user", "content": "Write one sentence about the sea."}]}
OTHER = {"messages": [{"role": "user", "content": "Why is the sky blue?"}]}
PARAMS: dict[str, dict[str, Any]] = {
    "greedy": {"max_tokens": 12},
    "sampled": {"temperature": 0.9, "top_p": 0.9, "seed": 5, "max_tokens": 12, "logprobs": 2},
    "penalized": {"temperature": 0.8, "seed": 7, "repetition_penalty": 1.3, "frequency_penalty": 0.5, "max_tokens": 12},
    "structured": {"structured_outputs": {"regex": "[0-9]{4}-[0-9]{2}"}, "seed": 2, "max_tokens": 12},
    "least": {"temperature": 1.0, "seed": 3, "min_tokens": 12, "max_tokens": 12},
}
CLOSE = 1e-3
"""How far a log probability may be off. Other batch shapes, AVX2 and noise as in ``make test-portable`` move them by up
to 5e-5; those of another position are far off. Ranks hold on any machine, because the tokens that are compared are
2.9e-3 from their neighbours at least. Another prompt or seed has to have such leads, too."""


@pytest.fixture
def driver(drive: Callable[..., Any]) -> Any:
    return drive("vllm")


def answer(driver: Any, params: dict[str, Any], journal: Sequence[Decisions] = ()) -> list[StageOutput]:
    """Answer the question alone in the batch: the same forwards give the same bits again."""
    driver.engine.start(StageRequest(1, (CLIENT,), params, journal=tuple(journal)))
    driver.live.add(1)
    driver.feed(1, QUESTION, last=True)
    outputs: list[StageOutput] = driver.run()[1]
    return outputs


def described(outputs: list[StageOutput]) -> list[tuple[Any, ...]]:
    return [(output.data, output.decisions, output.last) for output in outputs]


def like(outputs: list[StageOutput]) -> list[tuple[Any, ...]]:
    """What the description of the same answer equals: its log probabilities are close, and all else is the same."""
    return [(_close(data), decisions, last) for data, decisions, last in described(outputs)]


def _close(data: dict[str, Any]) -> dict[str, Any]:
    def token(found: dict[str, Any]) -> dict[str, Any]:
        return {**found, "logprob": pytest.approx(found["logprob"], rel=0, abs=CLOSE)}

    return {**data, "logprobs": [[*map(token, found)] for found in data["logprobs"]]} if "logprobs" in data else data


@pytest.mark.parametrize("name", PARAMS)
def test_a_resumed_answer_is_the_same_answer(driver: Any, name: str) -> None:
    whole = answer(driver, PARAMS[name])
    reported = sum(len(output.data.get("logprobs", ())) for output in whole)
    assert reported == ("logprobs" in PARAMS[name]) * whole[-1].data["completion_tokens"]
    assert sum(len(output.decisions) for output in whole) == whole[-1].data["completion_tokens"]
    for cut in (1, len(whole) // 2, len(whole)):
        journal = [output.decisions for output in whole[:cut]]
        assert described(answer(driver, PARAMS[name], journal)) == like(whole)


def test_a_stop_string_that_begins_in_the_journal_still_stops(driver: Any) -> None:
    plain = "".join(output.data.get("text", "") for output in answer(driver, PARAMS["greedy"]))
    stop = plain[len(plain) // 2 :][:6]
    params = {**PARAMS["greedy"], "stop": [stop]}
    whole = answer(driver, params)
    assert whole[-1].data["finish_reason"] == "stop"
    for cut in range(1, len(whole) + 1):
        assert described(answer(driver, params, [output.decisions for output in whole[:cut]])) == like(whole)


def test_the_journal_decides_and_not_the_model(driver: Any) -> None:
    """The journal of an answer with another seed is followed, beside another request."""
    other = answer(driver, {**PARAMS["sampled"], "seed": 99})
    journal = [output.decisions for output in other[:4]]
    driver.start(2, max_tokens=12)
    driver.feed(2, OTHER, last=True)
    resumed = answer(driver, {**PARAMS["greedy"], "logprobs": 2}, journal)
    assert described(resumed[:4]) == like(other[:4])
    assert resumed[-1].last


def test_several_answers_are_not_resumed(driver: Any) -> None:
    with pytest.raises(TemporarilyRefused, match="not resumed"):
        answer(driver, {"n": 2, "temperature": 1.0, "max_tokens": 4}, [(1,)])
    assert not driver.engine.busy


def test_a_client_cannot_decide_for_the_engine(driver: Any) -> None:
    plain = answer(driver, PARAMS["greedy"])
    forged = answer(driver, {**PARAMS["greedy"], "extra_args": {"omni_actors.decided": [1, 2, 3]}})
    assert [output.data for output in forged] == [output.data for output in plain]
