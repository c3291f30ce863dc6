"""Several answers (``n``) go on from one journal on vLLM, each as if nothing had happened."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from omni_actors.stages.base import StageOutput
from tests.vllm.test_resume import (
    OTHER,
    OWN,
    QUESTION,
    answer,
    assert_idle,
    decoded,
    described,
    left_out,
    like,
    tokens_in,
)

N = 3
SEVERAL: dict[str, Any] = {**OWN, "n": N, "seed": 5}
PARAMS: dict[str, dict[str, Any]] = {
    "sampled": {**SEVERAL, "top_p": 0.9},
    "penalized": {**SEVERAL, "repetition_penalty": 1.3, "frequency_penalty": 0.5, "presence_penalty": 0.2},
    "tokens": {**SEVERAL, "detokenize": False},
    "intervals": {**SEVERAL, "stream_interval": 3},
    "least": {**SEVERAL, "min_tokens": 10},
    "repeated": {**SEVERAL, "top_k": 1, "repetition_detection": {"max_pattern_size": 1, "min_count": 2}},
    "logprobs": {**SEVERAL, "logprobs": 2},
    "prompt": {**SEVERAL, "prompt_logprobs": 1},
    "structured": {"structured_outputs": {"regex": "[0-9]{4}(-[0-9]{2})?"}, "seed": 2, "temperature": 1.0, "n": N},
}


@pytest.fixture
def driver(drive: Callable[..., Any]) -> Any:
    return drive("vllm")


def by_answer(outputs: Sequence[StageOutput], describe: Callable[..., Any] = described) -> list[list[Any]]:
    """The outputs of each answer. Which answer ends last depends on how vLLM has batched them: see ``check_end``."""
    found: list[list[Any]] = [[] for _ in range(N)]
    for output, (data, decisions, _) in zip(outputs, describe(list(outputs)), strict=True):
        kept = {name: value for name, value in data.items() if name not in ("prompt_tokens", "completion_tokens")}
        found[output.data["index"]].append(({"text": "", **kept}, decisions))
    return found


def check_end(outputs: Sequence[StageOutput], whole: Sequence[StageOutput]) -> None:
    *others, last = outputs
    assert last.last
    assert not any(output.last for output in others)
    for name in ("prompt_tokens", "completion_tokens"):
        assert last.data[name] == whole[-1].data[name]


def tokens_of(params: dict[str, Any], outputs: Sequence[StageOutput]) -> int:
    return tokens_in(params, [output.decisions for output in outputs])


def check(driver: Any, params: dict[str, Any], whole: list[StageOutput], cut: int) -> None:
    journal = [output.decisions for output in whole[:cut]]
    before = decoded(driver)
    resumed = answer(driver, params, journal)
    assert described(resumed)[:cut] == described(whole)[:cut]
    assert by_answer(resumed) == by_answer(whole, like)
    check_end(resumed, whole)
    assert decoded(driver) - before == tokens_of(params, whole) - tokens_of(params, whole[:cut])
    assert_idle(driver)


@pytest.mark.parametrize("name", PARAMS)
def test_resumed_answers_are_the_same_answers(driver: Any, name: str) -> None:
    params = PARAMS[name]
    whole = answer(driver, params)
    assert len({str(each) for each in by_answer(whole)}) == N, "the answers differ"
    assert tokens_of(params, whole) == whole[-1].data["completion_tokens"]
    for cut in (1, 2, len(whole) // 2, len(whole) - 1, len(whole)):
        check(driver, params, whole, cut)


@pytest.mark.parametrize("ends", ["tokens", "strings", "strings of text"])
def test_answers_of_which_some_have_ended_are_the_same_answers(driver: Any, ends: str) -> None:
    """They end by a stop token or a stop string, one after the other."""
    plain = by_answer(answer(driver, SEVERAL))
    if ends == "tokens":
        stop: dict[str, Any] = {"stop_token_ids": [plain[0][3][1][-1], plain[2][6][1][-1]]}
    else:
        texts = ["".join(data["text"] for data, _ in each) for each in plain]
        stop = {"stop": [texts[0][4:9], texts[2][14:19]], "include_stop_str_in_output": ends != "strings"}
    params = {**SEVERAL, **stop}
    whole = answer(driver, params)
    reasons = [each[-1][0]["finish_reason"] for each in by_answer(whole)]
    assert reasons[0] == reasons[2] == "stop"
    ended = [at for at, output in enumerate(whole, 1) if "finish_reason" in output.data]
    assert len(set(ended)) == N
    for cut in {*ended, *(at - 1 for at in ended), *(at + 1 for at in ended[:-1])}:
        check(driver, params, whole, cut)


def test_log_probabilities_that_did_not_fit_are_decoded_again_for_the_outputs_that_are_needed(driver: Any) -> None:
    """The prompt's are in the first output of each answer: some have these outputs before those that are needed."""
    for more in ({"prompt_logprobs": 1}, {"logprobs": 2, "prompt_logprobs": 1}):
        params = {**SEVERAL, **more}
        whole = answer(driver, params)
        for needed_from, cut in ((1, 3), (2, 7), (9, 14)):
            journal = [output.decisions for output in whole[:cut]]
            if "logprobs" not in more:  # those of the prompt are the long ones
                journal = [*left_out(params, journal[:N]), *journal[N:]]
            else:
                journal = left_out(params, journal)
            resumed = answer(driver, params, journal, needed_from)
            assert described(resumed)[needed_from:cut] == like(whole)[needed_from:cut]
            assert all(output.partial == (at < needed_from) for at, output in enumerate(resumed[:N]))
            begun = [sum(output.data["index"] == index for output in whole[:needed_from]) for index in range(N)]
            for at, found, expected in zip(begun, by_answer(resumed), by_answer(whole, like), strict=True):
                assert found[at:] == expected[at:]
            check_end(resumed, whole)
            assert_idle(driver)


def test_answers_go_on_after_a_second_death_and_beside_other_requests(driver: Any) -> None:
    params = SEVERAL
    whole = answer(driver, params)
    first = answer(driver, params, [output.decisions for output in whole[:5]])[:17]
    driver.start(2, max_tokens=12)
    driver.feed(2, OTHER, last=True)
    second = answer(driver, params, [output.decisions for output in first])
    assert described(second[:17]) == described(first)
    assert by_answer(second) == by_answer(whole, like)
    check_end(second, whole)


def test_answers_that_are_aborted_leave_nothing(driver: Any) -> None:
    for params in (SEVERAL, PARAMS["structured"]):
        whole = answer(driver, params)
        for steps in (0, 1, 2):
            driver.start(2, journal=tuple(output.decisions for output in whole[:8]), **params)
            driver.feed(2, QUESTION, last=True)
            for _ in range(steps):
                driver.step()
            driver.abort(2)
            assert_idle(driver)
            assert not driver.engine._begun
    assert by_answer(answer(driver, SEVERAL)) == by_answer(answer(driver, SEVERAL, ()), like)


def test_vllms_figures_count_only_what_it_decodes(driver: Any) -> None:
    whole = answer(driver, SEVERAL)
    before = driver.engine.gauges()
    for cut in (6, len(whole)):
        answer(driver, SEVERAL, [output.decisions for output in whole[:cut]])
    after = driver.engine.gauges()
    new = {name: after[name] - before[name] for name in before}
    assert new["generation_tokens"] == tokens_of(SEVERAL, whole) - tokens_of(SEVERAL, whole[:6])
    assert new["prompt_tokens"] == 0
    assert new["time_to_first_token_seconds_count"] == N
    for name in ("time_to_first_token", "inter_token_latency", "request_queue_time"):
        assert 0 <= new[f"{name}_seconds_sum"] < 60
    assert after["num_requests_running"] == after["num_requests_waiting"] == 0
