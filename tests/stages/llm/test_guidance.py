"""Guided answers of the llm engine: equal to transformers' ``guidance_scale``, in any batch and wherever resumed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LogitsProcessor, LogitsProcessorList

from omni_actors.stages.autoregressive import language
from omni_actors.stages.autoregressive.guidance import guided
from omni_actors.stages.autoregressive.sampling import choose
from omni_actors.stages.base import CLIENT, InvalidRequest, StageRequest
from omni_actors.stages.llm.engine import LLMEngine, LLMRequest
from omni_actors.stages.llm.options import LLMParams
from omni_actors.stages.llm.prompt import Prompt
from tests.stages.llm.resumed_answers import PARAMS, check_every_cut, decisions
from tests.stages.llm.resumed_answers import answer as driven
from tests.stages.llm.tiny_engine import PROMPTS, Results, answer, assert_empty, opened, submit, transformers_of, user
from tests.support.adapters import adapter, save_adapter
from tests.support.closeness import OF_LARGEST, assert_close
from tests.support.engine_driver import Driver

NEGATIVE = "the sea and the fox, and nothing else"
GUIDED = {"guidance_scale": 2.5, "negative_prompt": NEGATIVE}
LENGTH = 24
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}, "warm": {"type": "boolean"}},
    "required": ["city", "warm"],
    "additionalProperties": False,
}


class _Leads(LogitsProcessor):  # type: ignore[misc]  # untyped
    """Notes by how much the best token leads, and the scores."""

    def __init__(self) -> None:
        self.leads: list[float] = []
        self.scores: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        best, second = scores[0].topk(2).values
        self.leads.append(float(best - second))
        self.scores.append(scores[0])
        return scores


def amplification(scale: float) -> float:
    """By what factor guidance enlarges the rounding of the two predictions from which it computes a score."""
    return abs(scale) + abs(scale - 1)


def generated(path: Path, prompt: str, scale: float, negative: str | None, **more: Any) -> tuple[list[int], _Leads]:
    """transformers' own greedy answer, up to the first token whose lead rounding could undo."""
    tokenizer, model = transformers_of(path)
    template: Any = {"add_generation_prompt": True, "return_tensors": "pt"}
    batch = tokenizer.apply_chat_template(user(prompt)["messages"], **template)
    ids = None if negative is None else tokenizer.apply_chat_template(user(negative)["messages"], **template)
    leads = _Leads()
    tokens = model.generate(
        **batch,
        max_new_tokens=LENGTH,
        do_sample=False,
        guidance_scale=scale,
        negative_prompt_ids=None if ids is None else ids["input_ids"],
        logits_processor=LogitsProcessorList([leads]),
        **more,
    )[0].tolist()[batch["input_ids"].shape[1] :]
    margins = [2 * OF_LARGEST * amplification(scale) * float(scores.abs().max()) for scores in leads.scores]
    leading = (lead > margin for lead, margin in zip(leads.leads, margins, strict=True))
    clear = next((at for at, leads_clearly in enumerate(leading) if not leads_clearly), len(tokens))
    return tokens[:clear], leads


@pytest.fixture
def driver(drive: Callable[..., Driver], engine: LLMEngine) -> Driver:
    return drive(engine)


@pytest.fixture
def scores(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The scores from which the engine chooses, of one request at a time."""
    found: list[Tensor] = []

    def noted(logits: Tensor, samplers: Any) -> list[int | None]:
        found.extend(logits)
        return choose(logits, samplers)

    monkeypatch.setattr(language, "choose", noted)
    return found


@pytest.mark.parametrize(
    ("scale", "negative"),
    [
        pytest.param(scale, negative, id=f"{name}-{scale}", marks=() if scale == 3.0 and negative else pytest.mark.slow)
        for scale in (0.0, 0.5, 1.5, 3.0, 7.0)
        for name, negative in (("negative", NEGATIVE), ("empty", ""), ("last token", None))
    ],
)
def test_guided_answers_are_those_of_transformers(
    driver: Driver, tiny: Path, scores: list[Tensor], scale: float, negative: str | None
) -> None:
    compared = 0
    for prompt in PROMPTS[:4]:
        expected, theirs = generated(tiny, prompt, scale, negative)
        scores.clear()
        outputs = driven(
            driver, prompt, max_tokens=LENGTH, guidance_scale=scale, negative_prompt=negative, ignore_eos=True
        )
        found = [token for decided in decisions(outputs) for token in decided]
        assert found[: len(expected)] == expected
        compared += len(expected)
        for ours, other in zip(scores, theirs.scores[: len(expected)], strict=False):
            assert_close(ours, other, amplified=amplification(scale))
    assert compared > 0.5 * LENGTH * 4


def test_penalties_come_after_guidance_as_in_transformers(driver: Driver, tiny: Path) -> None:
    """Of repeated tokens, those of the prompt count, and those of the negative prompt do not."""
    expected, _ = generated(tiny, PROMPTS[3], 2.5, NEGATIVE, repetition_penalty=1.3)
    outputs = driven(driver, PROMPTS[3], max_tokens=LENGTH, repetition_penalty=1.3, ignore_eos=True, **GUIDED)
    assert [token for decided in decisions(outputs) for token in decided][: len(expected)] == expected
    assert len(expected) > LENGTH / 2
    assert expected != generated(tiny, PROMPTS[3], 2.5, NEGATIVE)[0]


def test_a_scale_of_1_is_no_guidance(driver: Driver, engine: LLMEngine) -> None:
    plain = driven(driver, PROMPTS[2], max_tokens=6)
    submit(engine, 1, PROMPTS[2], max_tokens=6, guidance_scale=1.0, negative_prompt=NEGATIVE)
    Results().step(engine)
    assert len(engine._cache.lengths) == 1
    engine.abort(1)
    assert driven(driver, PROMPTS[2], max_tokens=6, guidance_scale=1.0, negative_prompt=NEGATIVE) == plain


@pytest.mark.usefixtures("clear_choices")
@pytest.mark.parametrize(
    "params",
    [
        pytest.param(params, id=name, marks=() if name == "sampled" else pytest.mark.slow)
        for name, params in {**PARAMS, "structure": {"max_tokens": 60, "structured_outputs": {"json": SCHEMA}}}.items()
    ],
)
def test_a_guided_answer_is_the_same_wherever_it_is_resumed(driver: Driver, params: dict[str, Any]) -> None:
    outputs = check_every_cut(driver, PROMPTS[2], **params, **GUIDED)
    if "structured_outputs" in params:
        assert set(json.loads("".join(output.data["text"] for output in outputs))) == {"city", "warm"}


@pytest.mark.usefixtures("clear_choices")
def test_a_stop_string_ends_both_sequences(driver: Driver, engine: LLMEngine) -> None:
    full = "".join(output.data["text"] for output in driven(driver, PROMPTS[2], max_tokens=LENGTH, **GUIDED))
    stop = full[5:8]
    found = "".join(
        output.data["text"] for output in driven(driver, PROMPTS[2], max_tokens=LENGTH, stop=(stop,), **GUIDED)
    )
    assert found == full[: full.index(stop)]
    assert_empty(engine)


@pytest.mark.usefixtures("clear_choices")
@pytest.mark.parametrize("rows", [2, pytest.param(3, marks=pytest.mark.slow), 8])
def test_guided_and_other_requests_share_a_batch(tiny: Path, rows: int) -> None:
    """A guided request takes two rows, and none of the answers depends on the batch."""
    with closing(opened(tiny, max_batch=rows)) as engine:
        params: list[dict[str, Any]] = [
            {"max_tokens": 3 + n % 6, **(GUIDED if n % 3 != 1 else {}), **({} if n % 2 else {"temperature": 1.0})}
            for n in range(len(PROMPTS))
        ]
        alone = [answer(engine, prompt, seed=7, **each) for prompt, each in zip(PROMPTS, params, strict=True)]
        results = Results()
        for number, (prompt, each) in enumerate(zip(PROMPTS, params, strict=True)):
            submit(engine, number, prompt, seed=7, **each)
            for _ in range(number % 3):
                results.step(engine)
            assert len(engine._cache.lengths) <= rows
        results.run(engine)
        assert [(results.text(n), results.ends[n]) for n in range(len(PROMPTS))] == alone
        assert_empty(engine)


@pytest.mark.usefixtures("clear_choices")
@pytest.mark.parametrize("steps", range(12))
def test_abort_in_any_state_removes_both_sequences_and_changes_no_other(engine: LLMEngine, steps: int) -> None:
    expected = answer(engine, PROMPTS[0], max_tokens=16)
    submit(engine, 0, PROMPTS[0], max_tokens=16)
    submit(engine, 1, PROMPTS[2], max_tokens=16, **GUIDED)
    results = Results()
    for _ in range(steps):
        results.step(engine)
    engine.abort(1)
    assert {each.id for each in [*engine._scheduler.rows, *engine._scheduler._waiting]} == {0}
    assert len(engine._cache.lengths) == len(engine._scheduler.rows)
    results.run(engine)
    assert (results.text(0), results.ends[0]) == expected
    assert_empty(engine)


@pytest.mark.parametrize("of_companion", [True, False])
def test_a_prediction_that_is_not_finite_ends_the_pair_alone(engine: LLMEngine, of_companion: bool) -> None:
    submit(engine, 1, PROMPTS[0], max_tokens=20)
    submit(engine, 2, PROMPTS[1], max_tokens=20, **GUIDED)
    results = Results()
    while len(engine._scheduler.decode_rows()) < 3:
        results.step(engine)
    row = next(n for n, each in enumerate(engine._scheduler.rows) if each.id == 2 and each.is_companion is of_companion)
    with torch.inference_mode():
        for store in (*engine._cache._keys, *engine._cache._values):
            store[row, :, : engine._cache.lengths[row]] = torch.nan
    results.run(engine)
    assert results.failed[2].code == "output_not_finite"
    assert list(results.ends) == [1]
    assert_empty(engine)


@pytest.fixture
def caching(tiny: Path) -> Iterator[LLMEngine]:
    with closing(opened(tiny, prefix_cache_mb=1)) as engine:
        yield engine
        assert_empty(engine)


@pytest.mark.usefixtures("clear_choices")
def test_a_negative_prompt_is_found_in_the_prefix_cache(
    caching: LLMEngine, drive: Callable[..., Driver], tiny: Path
) -> None:
    driver = drive(caching)
    first = driven(driver, PROMPTS[2], max_tokens=LENGTH, **GUIDED)
    assert not caching.gauges()["prefix_cache_hits"] > 20
    before = caching.gauges()["prefix_cache_hits"]
    assert check_every_cut(driver, PROMPTS[2], max_tokens=LENGTH, **GUIDED) == first
    assert caching.gauges()["prefix_cache_hits"] > before + 2 * 14


@pytest.mark.slow
@pytest.mark.usefixtures("clear_choices")
def test_a_companion_has_the_adapter_of_its_request(driver: Driver, tiny: Path, tmp_path: Path) -> None:
    lora = adapter(save_adapter(AutoModelForCausalLM.from_pretrained(tiny), tmp_path / "one"))
    plain = driven(driver, PROMPTS[2], max_tokens=LENGTH, **GUIDED)
    adapted = check_every_cut(driver, PROMPTS[2], max_tokens=LENGTH, lora=lora, **GUIDED)
    assert adapted != plain


@pytest.mark.parametrize(
    ("params", "param"),
    [
        ({"guidance_scale": -1}, "guidance_scale"),
        ({"guidance_scale": float("nan")}, "guidance_scale"),
        ({"guidance_scale": 2.0, "negative_prompt": "the " * 200}, "negative_prompt"),
    ],
)
def test_what_cannot_be_guided_is_refused(engine: LLMEngine, params: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        answer(engine, PROMPTS[0], **params)
    assert caught.value.param == param
    assert_empty(engine)


def test_an_embedding_cannot_be_guided(engine: LLMEngine) -> None:
    with pytest.raises(InvalidRequest, match="an embedding") as caught:
        engine.start(StageRequest(0, (CLIENT,), {**GUIDED, "pooling": "mean"}, downstream=False))
    assert caught.value.param == "guidance_scale"


def test_an_engine_with_one_row_refuses_guidance(tiny: Path) -> None:
    with closing(opened(tiny, max_batch=1)) as engine, pytest.raises(InvalidRequest, match="2 rows") as caught:
        engine.start(StageRequest(0, (CLIENT,), GUIDED))
    assert caught.value.param == "guidance_scale"


@pytest.mark.parametrize(
    ("data", "tensors", "negative", "words"),
    [
        ({"prompt": "the fox"}, {}, "", "it has no tokens$"),
        ({}, {"embeds": np.ones((4, 32), np.float32)}, None, "there is none, and embeddings have no last token$"),
    ],
)
def test_a_companion_without_tokens_is_refused(
    driver: Driver, data: dict[str, Any], tensors: dict[str, Any], negative: str | None, words: str
) -> None:
    driver.start(0, guidance_scale=2.0, negative_prompt=negative)
    with pytest.raises(InvalidRequest, match=f"^negative_prompt: {words}") as refused:
        driver.feed(0, data, tensors, last=True)
    assert refused.value.param == "negative_prompt"
    driver.live.discard(0)


@pytest.mark.parametrize("scale", [0.0, 3.0])
def test_a_token_that_either_sequence_excludes_is_excluded(scale: float) -> None:
    own, companion = (LLMRequest(StageRequest(0, (CLIENT,), {}), LLMParams(), Prompt((CLIENT,))) for _ in range(2))
    own.guide_by(companion, scale)
    excluded = float("-inf")
    logits = torch.tensor([[0.0, 1.0, excluded, excluded], [0.0, excluded, 1.0, excluded]])
    sequences, scores = guided([companion, own], logits)
    assert sequences == [own]
    assert scores[0].isfinite().tolist() == [True, False, False, False]
    assert not scores.isnan().any()


@pytest.mark.parametrize("scale", [0.0, 3.0])
def test_a_raw_prompt_has_a_raw_negative_prompt(driver: Driver, tiny: Path, scale: float) -> None:
    tokenizer, model = transformers_of(tiny)
    prompt, negative = (tokenizer(text, return_tensors="pt") for text in ("the fox and", "the sea"))
    expected = model.generate(
        **prompt, max_new_tokens=5, do_sample=False, guidance_scale=scale, negative_prompt_ids=negative["input_ids"]
    )[0].tolist()[prompt["input_ids"].shape[1] :]
    driver.start(0, max_tokens=5, guidance_scale=scale, negative_prompt="the sea")
    driver.feed(0, {"prompt": "the fox and"}, last=True)
    assert [token for decided in decisions(driver.run()[0]) for token in decided] == expected
