"""Guided answers of the thinkers: ids equal to transformers' ``guidance_scale``, and rows of the guided sequence."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList

from omni_actors.stages.base import InvalidRequest
from omni_actors.stages.multimodal.processor import OmniProcessor
from tests.support.closeness import OF_LARGEST, assert_same_results
from tests.support.conformance import chunks
from tests.support.engine_driver import Driver
from tests.support.omni_questions import STORY, SYSTEM, Ask
from tests.support.qwen2_5_reference import Reference as Qwen25
from tests.support.qwen3_reference import Reference as Qwen3
from tiny_models import qwen2_5, qwen3

pytestmark = pytest.mark.voice  # it needs the libraries of the extra; the weights are random

LENGTH, SCALE = 10, 2.5
NEGATIVE = "sing about the sea , and nothing else"
TEXT, MEDIA = Ask(STORY, SYSTEM), Ask(STORY, SYSTEM, audio=(0.5,), image=((64, 64),))
FAMILIES: dict[str, tuple[Any, Any]] = {"qwen3_thinker": (qwen3, Qwen3), "qwen2_5_thinker": (qwen2_5, Qwen25)}


class Opened(NamedTuple):
    engine: Any
    thinker: Any
    """transformers' model."""
    processor: OmniProcessor


@pytest.fixture(scope="module", params=["qwen3_thinker", pytest.param("qwen2_5_thinker", marks=pytest.mark.slow)])
def opened(
    request: pytest.FixtureRequest, open_stage: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Opened]:
    tiny, reference = FAMILIES[request.param]
    directory = tiny.save(tmp_path_factory.mktemp("checkpoint"), text_eos=0.0)
    with closing(open_stage(request.param, directory, prefill_chunk=5)) as engine:
        yield Opened(engine, reference(directory, clear=False).model.thinker, OmniProcessor(directory))


@pytest.fixture
def driver(opened: Opened, drive: Callable[..., Driver]) -> Iterator[Driver]:
    yield drive(opened.engine)
    assert not opened.engine.busy
    assert opened.engine._cache.lengths == []


def answer(driver: Driver, ask: Ask, **params: Any) -> list[Any]:
    driver.start(1, **{"max_tokens": LENGTH, "ignore_eos": True, **params})
    for number, chunk in enumerate(ask.chunks):
        driver.feed(1, *chunk, last=number == len(ask.chunks) - 1)
    outputs: list[Any] = driver.run()[1]
    return outputs


def guided(negative: str | None = NEGATIVE) -> dict[str, Any]:
    return {"guidance_scale": SCALE, "negative_prompt": negative}


def tokens_of(outputs: list[Any]) -> list[int]:
    return [token for output in outputs for token in output.decisions]


class _Clear(LogitsProcessor):  # type: ignore[misc]  # untyped
    """Notes whether each choice leads by more than rounding."""

    def __init__(self) -> None:
        self.found: list[bool] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        best, second = scores[0].topk(2).values
        self.found.append(bool(best - second > 2 * OF_LARGEST * (2 * SCALE - 1) * scores.abs().max()))
        return scores


def generated(opened: Opened, negative: str | None) -> list[int]:
    """transformers' own answer, up to the first choice that rounding could turn."""
    ids = torch.tensor([opened.processor(TEXT.prompt).ids])
    unwanted = None if negative is None else torch.tensor([opened.processor(TEXT.prompt.negative(negative)).ids])
    clear = _Clear()
    tokens: list[int] = opened.thinker.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=LENGTH,
        do_sample=False,
        eos_token_id=None,
        use_cache=False,  # with its cache, transformers gives the second sequence positions of the wrong number
        guidance_scale=SCALE,
        negative_prompt_ids=unwanted,
        logits_processor=LogitsProcessorList([clear]),
    )[0, ids.shape[1] :].tolist()
    return tokens[: [*clear.found, False].index(False)]


@pytest.mark.parametrize("negative", [NEGATIVE, "", None], ids=["negative", "empty", "last token"])
def test_ids_are_those_of_transformers(opened: Opened, driver: Driver, negative: str | None) -> None:
    expected = generated(opened, negative)
    assert len(expected) > LENGTH / 2
    found = tokens_of(answer(driver, TEXT, downstream=False, **guided(negative)))
    assert found[: len(expected)] == expected


@pytest.mark.usefixtures("clear_choices")
@pytest.mark.parametrize("ask", [pytest.param(TEXT, id="text"), pytest.param(MEDIA, id="media")])
def test_rows_for_the_talker_are_those_of_the_guided_tokens(driver: Driver, ask: Ask) -> None:
    """A request without guidance that has decided the same tokens has the same text and rows."""
    outputs = answer(driver, ask, **guided())
    assert tokens_of(outputs) != tokens_of(answer(driver, ask))
    journal = tuple(output.decisions for output in outputs)
    assert_same_results(chunks(answer(driver, ask, journal=journal)), chunks(outputs))


def test_both_prompts_are_rendered_with_the_requests_variables(
    opened: Opened, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    processor, kwargs = opened.engine._processor, {"note": "the sea"}
    monkeypatch.setattr(processor, "_template", processor._template + "{{ note }}")
    driver.start(1, downstream=False, chat_template_kwargs=kwargs, **guided())
    driver.feed(1, *TEXT.chunks[0], last=True)
    [request] = [each for each in opened.engine._requests.values() if each.companion is not None]
    for sequence, prompt in ((request, TEXT.prompt), (request.companion, TEXT.prompt.negative(NEGATIVE))):
        expected = processor(prompt, template_kwargs=kwargs).ids
        assert sequence.ids.tolist() == expected != processor(prompt).ids
    driver.abort(1)


@pytest.mark.usefixtures("clear_choices")
@pytest.mark.parametrize("cut", [1, 4, LENGTH - 1])
def test_a_guided_answer_goes_on_behind_its_journal(driver: Driver, cut: int) -> None:
    outputs = answer(driver, MEDIA, **guided())
    journal = tuple(output.decisions for output in outputs[:cut])
    assert_same_results(chunks(answer(driver, MEDIA, journal=journal, **guided())), chunks(outputs))


@pytest.mark.usefixtures("clear_choices")
@pytest.mark.parametrize("steps", [0, 1, 3, 6, 9])
def test_an_abort_ends_both_sequences(opened: Opened, driver: Driver, steps: int) -> None:
    driver.start(1, max_tokens=LENGTH, **guided())
    driver.feed(1, *TEXT.chunks[0], last=True)
    for _ in range(steps):
        driver.step()
    driver.abort(1)
    assert not [*opened.engine._scheduler.rows, *opened.engine._scheduler._waiting]


def test_a_negative_prompt_that_cannot_be_read_is_refused(driver: Driver) -> None:
    driver.start(1, max_tokens=LENGTH, **guided("word " * 100_000))
    with pytest.raises(InvalidRequest, match="negative_prompt") as refused:
        driver.feed(1, *TEXT.chunks[0], last=True)
    assert (refused.value.param, refused.value.code) == ("negative_prompt", "context_length_exceeded")
    driver.live.discard(1)
