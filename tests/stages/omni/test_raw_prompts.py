"""Raw prompts of the thinkers: text with placeholders, token ids, and embeddings."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import chain
from typing import Any
from unittest import mock

import numpy as np
import pytest

from omni_actors.stages.base import CLIENT, Decisions, InvalidRequest, StageFailure, StageRequest
from tests.support.closeness import assert_same_results
from tests.support.conformance import chunks
from tests.support.engine_driver import Driver
from tests.support.omni_questions import STORY, Ask, noise

pytestmark = [
    pytest.mark.voice,  # it needs the libraries of the extra; the weights are random
    pytest.mark.usefixtures("clear_choices"),
]

SHOWN = Ask("what is this ?", audio=(0.3,), image=((60, 90), (64, 64)), video=4)


@pytest.fixture(scope="module", params=["qwen3_thinker", "qwen2_5_thinker"])
def engine(request: pytest.FixtureRequest, open_stage: Callable[..., Any]) -> Iterator[Any]:
    with closing(open_stage(request.param, prefill_chunk=16)) as opened:
        yield opened


@pytest.fixture
def driver(engine: Any, drive: Callable[..., Driver]) -> Driver:
    return drive(engine)


def rendered(engine: Any, ask: Ask) -> str:
    """The conversation as its template renders it."""
    processor = engine._processor
    parts = [{**part, part["type"]: ""} if part["type"] != "text" else part for part in ask.messages[-1]["content"]]
    messages = [*ask.messages[:-1], {"role": "user", "content": parts}]
    text: str = processor.tokenizer.apply_chat_template(
        messages, chat_template=processor._template, add_generation_prompt=True, tokenize=False
    )
    return text


def answer(
    driver: Driver,
    asked: list[tuple[dict[str, Any], dict[str, Any]]],
    journal: tuple[Decisions, ...] = (),
    *,
    downstream: bool = True,
    **params: Any,
) -> list[Any]:
    params = {"max_tokens": 12, "ignore_eos": True, **params}
    driver.engine.start(StageRequest(1, (CLIENT,), params, journal=journal, downstream=downstream))
    driver.live.add(1)
    try:
        for number, chunk in enumerate(asked):
            driver.feed(1, *chunk, last=number == len(asked) - 1)
    except InvalidRequest:
        driver.live.discard(1)
        raise
    outputs: list[Any] = driver.run()[1]
    return outputs


def raw(ask: Ask, data: dict[str, Any], tensors: dict[str, Any]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """The chunks of a question, with a raw prompt in place of the conversation."""
    return [(data, tensors) if "messages" in given else (given, others) for given, others in ask.chunks]


@pytest.mark.parametrize("ask", [Ask(STORY), SHOWN], ids=["text", "media"])
def test_a_raw_prompt_is_answered_like_the_conversation_that_it_is_of(engine: Any, driver: Driver, ask: Ask) -> None:
    expected = chunks(answer(driver, ask.chunks))
    text = rendered(engine, ask)
    ids = engine._processor.tokenizer.encode(text)
    for prompt in (({"prompt": text}, {}), ({}, {"token_ids": np.array(ids)})):
        assert_same_results(chunks(answer(driver, raw(ask, *prompt))), expected)


def test_an_answer_to_embeddings_is_the_answer_to_their_tokens_wherever_it_is_resumed(
    engine: Any, driver: Driver
) -> None:
    ids = engine._processor.tokenizer.encode(rendered(engine, Ask(STORY)))
    table = engine._language.embed_tokens.weight.detach().cpu().numpy()
    expected = answer(driver, Ask(STORY).chunks, downstream=False, temperature=1.0, seed=3)
    journal = tuple(output.decisions for output in expected)
    for cut in (0, 1, len(journal) // 2, len(journal)):
        found = answer(driver, [({}, {"embeds": table[ids]})], journal[:cut], downstream=False, temperature=1.0, seed=3)
        assert [output.data for output in found] == [output.data for output in expected]
        assert tuple(output.decisions for output in found) == journal


def refuse(driver: Driver, asked: list[tuple[dict[str, Any], dict[str, Any]]], **params: Any) -> None:
    """Raise the refusal of a prompt. One with media is read in a step."""
    [output] = answer(driver, asked, **params)
    raise output.error


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ([({"prompt": "{image}"}, {})], "image 0, which was not sent"),
        ([({"prompt": "a"}, {}), ({"index": 0}, {"image": noise(0, 64, 64)})], "image 0, which was sent"),
        ([({"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, {})], "no messages"),
        ([({"prompt": ""}, {})], "prompt"),
        ([({}, {"token_ids": np.array([10**7])})], "no token 10000000"),
        ([({}, {"embeds": np.ones((4, 3), np.float32)})], "rows of 3 numbers; the model takes 64"),
        ([({}, {"embeds": np.ones((4, 64), np.float32)})], "talker needs the tokens"),
    ],
)
def test_a_wrong_raw_prompt_is_refused(
    engine: Any, driver: Driver, asked: list[tuple[dict[str, Any], dict[str, Any]]], words: str
) -> None:
    if asked[0][0].get("prompt") == "{image}":
        asked = [({"prompt": engine._processor._placeholders["image"]}, {})]
    with pytest.raises(InvalidRequest, match=words):
        refuse(driver, asked)
    assert not driver.engine.busy


@pytest.mark.parametrize(
    "end", ["<|im_start|>user\na", "<|im_start|>assistant", "<|im_start|>assistant\na", "<|im_start|>assistanta"]
)
def test_for_speech_a_raw_prompt_ends_with_the_beginning_of_the_answer(engine: Any, driver: Driver, end: str) -> None:
    """The talker of Qwen2.5-Omni takes every position of the prompt."""
    asked = [({"prompt": f"<|im_start|>user\na<|im_end|>\n{end}"}, {})]
    assert answer(driver, asked, downstream=False)
    if engine._config.model_type == "qwen2_5_omni":
        assert answer(driver, asked)
        return
    with pytest.raises(InvalidRequest, match="has to end with the beginning of the answer's turn"):
        answer(driver, asked)


def test_for_speech_variables_of_the_chat_template_change_no_end(
    engine: Any, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine._processor, "_template", engine._processor._template + "{{ note }}")
    for note, refused in (("", False), ("the sea", engine._config.model_type != "qwen2_5_omni")):
        driver.start(1, max_tokens=2, chat_template_kwargs={"note": note})
        if not refused:
            driver.feed(1, *Ask(STORY).chunks[0], last=True)
            driver.run()
            continue
        with pytest.raises(InvalidRequest, match="has to end with the beginning of the answer's turn") as caught:
            driver.feed(1, *Ask(STORY).chunks[0], last=True)
        assert caught.value.param == "chat_template_kwargs"
        driver.live.discard(1)


def test_hostile_token_ids_end_no_engine(engine: Any, driver: Driver, lenient_choices: None) -> None:
    """Control tokens in any order, with an image: each request is answered or refused."""
    processor, chunk = engine._processor, ({"index": 0}, {"image": noise(0, 64, 64)})
    shown = processor.tokenizer.encode(rendered(engine, Ask("a", image=((64, 64),))))
    at = next(at for at, id_ in enumerate(shown) if id_ in processor._placeholder_ids)
    image = shown[at - 1 : at + 2]
    parts = [*([id_] for id_ in sorted(processor.tokenizer.added_tokens_decoder)), *([id_] for id_ in range(8)), image]
    drawn, answered = random.Random(1), 0
    for number in range(40):
        ids = [*chain(image, *drawn.choices(parts, k=drawn.randrange(12)))]
        request = StageRequest(number, (CLIENT,), {"max_tokens": 2}, downstream=bool(number % 2))
        driver.engine.start(request)
        driver.live.add(number)
        driver.feed(number, {}, {"token_ids": np.array(ids)})
        driver.feed(number, *chunk, last=True)
        answered += not any(isinstance(output, StageFailure) for output in driver.run()[number])
    assert 0 < answered < 40


def test_a_request_may_choose_the_size_of_pictures_and_the_rate_of_frames(engine: Any, driver: Driver) -> None:
    def prompt_tokens(ask: Ask, **params: Any) -> int:
        tokens: int = answer(driver, ask.chunks, max_tokens=1, **params)[-1].data["prompt_tokens"]
        return tokens

    image, video, text = Ask("a", image=((112, 112),)), Ask("a", video=8), Ask("a")
    usual = prompt_tokens(image)
    smaller, larger = {"min_pixels": 1, "max_pixels": 56 * 56}, {"min_pixels": 168 * 168, "max_pixels": 2**20}
    assert prompt_tokens(text) < prompt_tokens(image, mm_processor_kwargs=smaller) < usual
    assert prompt_tokens(image, mm_processor_kwargs=larger) > usual
    assert prompt_tokens(image) == usual, "it was for one request"
    assert prompt_tokens(text, mm_processor_kwargs=smaller) == prompt_tokens(text)
    assert prompt_tokens(video, mm_processor_kwargs={"fps": 1}) < prompt_tokens(video)
    with pytest.raises(InvalidRequest, match="more than max_pixels"):
        refuse(driver, text.chunks, mm_processor_kwargs={"min_pixels": 9, "max_pixels": 8})
    with pytest.raises(InvalidRequest, match="limit"):
        refuse(driver, image.chunks, mm_processor_kwargs={"min_pixels": 2**30, "max_pixels": 2**30})


def test_a_cut_prompt_is_answered_or_refused(engine: Any, driver: Driver) -> None:
    kwargs = {"truncation": True, "max_length": 6, "truncation_side": "left"}
    outputs = answer(driver, Ask(STORY).chunks, downstream=False, tokenization_kwargs=kwargs)
    assert outputs[-1].data["prompt_tokens"] == 6
    with pytest.raises(InvalidRequest, match="leaves out"):
        refuse(driver, SHOWN.chunks, tokenization_kwargs=kwargs)


def test_a_long_prompt_is_cut_and_not_refused(driver: Driver) -> None:
    kwargs = {"truncation": True, "max_length": 6}
    long = "a b c " * 20_000
    for asked in (Ask(long).chunks, [({"prompt": long}, {})]):
        outputs = answer(driver, asked, downstream=False, tokenization_kwargs=kwargs)
        assert outputs[-1].data["prompt_tokens"] == 6
        with pytest.raises(InvalidRequest, match="the limit is"):
            refuse(driver, asked, tokenization_kwargs={**kwargs, "max_length": 10**6})


def test_a_token_that_the_model_lacks_fails_its_own_request(engine: Any, driver: Driver) -> None:
    """A token was added to the tokenizer alone."""
    processor = engine._processor
    with mock.patch.object(processor, "_size", max(processor.tokenizer.encode("a"))):
        for asked in (Ask("a").chunks, [({"prompt": "a"}, {})]):
            with pytest.raises(InvalidRequest, match="the model has no token"):
                refuse(driver, asked)
        for params in ({"negative_prompt": "a"}, {}):
            with pytest.raises(InvalidRequest, match="the model has no token"):
                refuse(driver, Ask("a").chunks, guidance_scale=2.0, **params)
