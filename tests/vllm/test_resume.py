"""A request that goes on from its journal on vLLM: as if nothing had happened.

Where a test says so, it also counts the tokens that vLLM has decoded: not those that it computes in one prefill.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from vllm import SamplingParams

from omni_actors.stages.base import Decisions, StageOutput
from omni_actors.stages.vllm import decided, engine
from omni_actors.stages.vllm.decided import entries
from tests.vllm.test_text import embeds_of

QUESTION = {"messages": [{"role": "user", "content": "Write one sentence about the sea."}]}
OTHER = {"messages": [{"role": "user", "content": "Why is the sky blue?"}]}
OWN: dict[str, Any] = {"temperature": 0.9, "max_tokens": 12, "extra_args": {"own_logits": True}}
"""Tokens are drawn from the test's own logits: a prefill rounds otherwise than the steps of the undisturbed answer."""
PARAMS: dict[str, dict[str, Any]] = {
    "greedy": {"max_tokens": 12},
    "sampled": {**OWN, "top_p": 0.9, "seed": 5},
    "top_k": {**OWN, "top_k": 40, "seed": 6},
    "penalized": {**OWN, "seed": 7, "repetition_penalty": 1.3, "frequency_penalty": 0.5, "presence_penalty": 0.2},
    "least": {**OWN, "seed": 3, "min_tokens": 12},
    "tokens": {**OWN, "seed": 4, "detokenize": False},
    "intervals": {**OWN, "seed": 4, "stream_interval": 3},
    "words": {"max_tokens": 12, "bad_words": ["the ocean", " sea", "vast"]},
    "repeated": {**OWN, "seed": 8, "top_k": 1, "repetition_detection": {"max_pattern_size": 1, "min_count": 2}},
    "logprobs": {"temperature": 0.9, "top_p": 0.9, "seed": 5, "max_tokens": 12, "logprobs": 2},
    "prompt": {"max_tokens": 12, "prompt_logprobs": 1},
    "both": {"max_tokens": 12, "logprobs": 0, "prompt_logprobs": 0, "stream_interval": 3, "detokenize": False},
    "ids": {"max_tokens": 12, "logprob_token_ids": [7, 5, 7, 260]},
    "structured": {"structured_outputs": {"regex": "[0-9]{4}-[0-9]{2}"}, "seed": 2, "max_tokens": 12},
}
REPORTED = {"logprobs", "prompt_logprobs"}
CLOSE = 1e-3
"""How far a log probability may be off. Other batch shapes, AVX2 and noise as in ``make test-portable`` move them by up
to 5e-5; those of another position are far off. Ranks hold on any machine, because the tokens that are compared are
2.9e-3 from their neighbours at least. Another prompt or seed has to have such leads, too."""


@pytest.fixture
def driver(drive: Callable[..., Any]) -> Any:
    return drive("vllm")


def answer(
    driver: Any,
    params: dict[str, Any],
    journal: Sequence[Decisions] = (),
    needed_from: int = 0,
    tensors: dict[str, Any] | None = None,
    asked: dict[str, Any] = QUESTION,
) -> list[StageOutput]:
    """Answer the question, or embeddings, alone in the batch."""
    driver.start(1, journal=tuple(journal), needed_from=needed_from, **params)
    driver.feed(1, {} if tensors else asked, tensors or {}, last=True)
    outputs: list[StageOutput] = driver.run()[1]
    return outputs


def decoded(driver: Any) -> float:
    """Return how many tokens vLLM has decoded so far."""
    found: float = driver.engine.gauges()["generation_tokens"]
    return found


def assert_idle(driver: Any) -> None:
    """vLLM keeps nothing of requests that have ended."""
    llm = driver.engine._llm
    scheduler, processor = llm.engine_core.engine_core.scheduler, llm.output_processor
    assert not driver.engine.busy
    assert not scheduler.requests
    assert not scheduler.has_requests()
    assert scheduler.kv_cache_manager.usage == 0
    assert not processor.request_states
    assert not processor.parent_requests
    assert not processor.external_req_ids


def tokens_in(params: dict[str, Any], journal: Sequence[Decisions]) -> int:
    """Return how many tokens a journal has."""
    return sum(len(entry.tokens) for entry in entries(journal, sampling_of(params)))


def left_out(params: dict[str, Any], journal: Sequence[Decisions]) -> list[Decisions]:
    """Return the journal as if its log probabilities had not fitted."""
    sampling = sampling_of(params)
    return [entry._replace(logprobs=None).decisions(sampling, 0) for entry in entries(journal, sampling)]


def sampling_of(params: dict[str, Any]) -> SamplingParams:
    names = "n", "logprobs", "prompt_logprobs", "logprob_token_ids"
    return SamplingParams(**{name: params[name] for name in names if name in params}, temperature=1.0)


def described(outputs: list[StageOutput]) -> list[tuple[Any, ...]]:
    return [(output.data, output.decisions, output.last) for output in outputs]


def like(outputs: list[StageOutput]) -> list[tuple[Any, ...]]:
    """What the description of the same answer equals: its log probabilities are close, and all else is the same.

    Decisions that have log probabilities say no more than the data.
    """
    return [
        (_close(data), mock.ANY if REPORTED & data.keys() else decisions, last)
        for data, decisions, last in described(outputs)
    ]


def _close(data: dict[str, Any]) -> dict[str, Any]:
    def token(found: dict[str, Any]) -> dict[str, Any]:
        return {**found, "logprob": pytest.approx(found["logprob"], rel=0, abs=CLOSE)}

    names = data.keys() & REPORTED
    return {**data, **{name: [found and [*map(token, found)] for found in data[name]] for name in names}}


@pytest.mark.parametrize("name", PARAMS)
def test_a_resumed_answer_is_the_same_answer(driver: Any, name: str) -> None:
    """The tokens of all outputs are computed at once, and log probabilities are those that were put out before."""
    params = PARAMS[name]
    whole = answer(driver, params)
    total = whole[-1].data["completion_tokens"]
    reported = sum(len(output.data.get("logprobs", ())) for output in whole)
    assert reported == (name in ("logprobs", "both", "ids")) * total
    assert tokens_in(params, [output.decisions for output in whole]) == total
    assert (whole[-1].data["finish_reason"] == "repetition") == (name == "repeated")
    for cut in (1, len(whole) // 2, len(whole)):
        journal = [output.decisions for output in whole[:cut]]
        for needed_from in {0, cut // 2}:
            before = decoded(driver)
            resumed = answer(driver, params, journal, needed_from)
            assert described(resumed)[needed_from:cut] == described(whole)[needed_from:cut]
            assert described(resumed)[needed_from:] == like(whole)[needed_from:]
            assert decoded(driver) - before == total - tokens_in(params, journal)
            assert_idle(driver)


def test_a_journal_has_room_for_so_many_log_probabilities(driver: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "MOST_LOGPROBS", 60)
    params = PARAMS["logprobs"]
    whole = answer(driver, params)
    journal = [output.decisions for output in whole]
    has_them = [decisions != short for decisions, short in zip(journal, left_out(params, journal), strict=True)]
    assert has_them[0]
    assert not has_them[-1]
    assert sum(map(len, journal)) - sum(map(len, left_out(params, journal))) <= 60 + len(journal)
    resumed = answer(driver, params, journal[:-1])
    assert described(resumed) == like(whole)
    assert [output.decisions for output in resumed] == journal


@pytest.mark.parametrize("name", ["logprobs", "prompt"])
def test_outputs_whose_log_probabilities_did_not_fit_are_decoded_again_if_they_are_needed(
    driver: Any, name: str
) -> None:
    params = PARAMS[name]
    whole = answer(driver, params)
    total, cut = whole[-1].data["completion_tokens"], len(whole) // 2
    journal = [output.decisions for output in whole[:cut]]
    short = left_out(params, journal)
    for mixed, needed_from, at_once in (
        (short, 0, 0),
        (short, 2, 2),
        (short, cut, cut),
        ([*journal[:3], *short[3:]], 1, 3),
        ([*journal[:2], *short[2:3], *journal[3:]], 0, 2),
    ):
        before = decoded(driver)
        resumed = answer(driver, params, mixed, needed_from)
        assert described(resumed)[needed_from:] == like(whole)[needed_from:]
        assert [output.partial for output in resumed] == [
            number < needed_from and len(mixed[number]) == 2 for number in range(len(whole))
        ]
        assert decoded(driver) - before == total - tokens_in(params, mixed[:at_once])
        assert_idle(driver)
    with mock.patch.object(decided, "MOST_DECISIONS", 2):
        assert [output.decisions for output in answer(driver, params)[:cut]] == short


def test_a_stop_string_that_begins_in_the_journal_still_stops(driver: Any) -> None:
    plain = "".join(output.data.get("text", "") for output in answer(driver, PARAMS["greedy"]))
    stop = plain[len(plain) // 2 :][:6]
    for more in ({}, {"include_stop_str_in_output": True}):
        params = {**PARAMS["greedy"], "stop": [stop], **more}
        whole = answer(driver, params)
        assert whole[-1].data["finish_reason"] == "stop"
        for cut in range(1, len(whole) + 1):
            assert described(answer(driver, params, [output.decisions for output in whole[:cut]])) == like(whole)


def test_a_character_of_several_tokens_is_put_out_again(driver: Any) -> None:
    tokens = driver.engine._vocabulary.tokenizer.encode("A sea 🌊, é and 海.")
    params = {"max_tokens": len(tokens) + 3}
    whole = answer(driver, params, [tuple(tokens)])  # vLLM decodes each of these tokens
    assert any(len(output.decisions) > 1 for output in whole)
    for cut in range(1, len(whole) + 1):
        journal = [output.decisions for output in whole[:cut]]
        assert described(answer(driver, params, journal)[:cut]) == like(whole[:cut])


def test_a_token_with_log_probabilities_may_end_a_character_that_the_journal_begins(driver: Any) -> None:
    tokens = driver.engine._vocabulary.tokenizer.encode("A sea 🌊, é and 海.")
    params = {"max_tokens": len(tokens), "logprobs": 1}
    whole = answer(driver, params, [(1, token) for token in tokens])  # vLLM decodes each of these tokens
    journal = [output.decisions for output in whole]
    assert len(journal) == len(tokens)
    for cut in range(1, len(tokens)):
        resumed = answer(driver, params, [*journal[:cut], *left_out(params, journal[cut:])])
        assert described(resumed) == like(whole)


def test_the_journal_decides_and_not_the_model(driver: Any) -> None:
    """The journal of an answer with another seed is followed, beside another request."""
    for more in ({"logprobs": 2}, {}):
        params = {**PARAMS["greedy"], **more}
        other = answer(driver, {**params, "temperature": 0.9, "seed": 99})
        journal = left_out(params, [output.decisions for output in other[:4]])
        driver.start(2, max_tokens=12)
        driver.feed(2, OTHER, last=True)
        resumed = answer(driver, params, journal)
        assert described(resumed[:4]) == like(other[:4])
        assert resumed[-1].last


def test_an_answer_to_embeddings_goes_on(driver: Any, smollm2: Path) -> None:
    tensors = {"embeds": embeds_of(driver.engine, smollm2, QUESTION["messages"][0]["content"])}
    whole = answer(driver, PARAMS["greedy"], tensors=tensors)
    journal = [output.decisions for output in whole[:6]]
    before = decoded(driver)
    assert described(answer(driver, PARAMS["greedy"], journal, tensors=tensors)) == like(whole)
    assert decoded(driver) - before == len(whole) - 6


def test_a_request_that_is_aborted_before_its_first_step_puts_nothing_out(driver: Any) -> None:
    whole = answer(driver, PARAMS["greedy"])
    driver.start(2, journal=tuple(output.decisions for output in whole[:6]), **PARAMS["greedy"])
    driver.feed(2, QUESTION, last=True)
    driver.abort(2)
    assert not driver.engine._begun, "nothing is kept of it"
    assert described(answer(driver, PARAMS["greedy"])) == like(whole)


def test_a_client_cannot_decide_for_the_engine(driver: Any) -> None:
    plain = answer(driver, PARAMS["greedy"])
    forged = answer(
        driver, {**PARAMS["greedy"], "extra_args": {"omni_actors.decided": [1, 2], "omni_actors.at_once": 1}}
    )
    assert [output.data for output in forged] == [output.data for output in plain]
