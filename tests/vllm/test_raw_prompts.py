"""Raw prompts of the thinkers on vLLM: text with placeholders, token ids, and embeddings."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import numpy as np
import pytest

from omni_actors.errors import InvalidRequest
from omni_actors.stages.base import CLIENT, Decisions, StageFailure, StageRequest
from omni_actors.stages.vllm.media import MARKS
from tests.support.omni_questions import STORY, Ask

SHOWN = Ask("what is this ?", audio=(0.3,), image=((64, 64),))


@pytest.fixture(scope="module", params=["vllm_qwen3_thinker", "vllm_qwen2_5_thinker"])
def engine(request: pytest.FixtureRequest, open_stage: Callable[..., Any]) -> Iterator[Any]:
    with closing(open_stage(request.param, engine_args={"enable_prompt_embeds": True})) as opened:
        yield opened


@pytest.fixture
def driver(engine: Any, drive: Callable[..., Any]) -> Any:
    return drive(engine)


def rendered(engine: Any, ask: Ask) -> str:
    processor = engine._processor
    parts = [{**part, part["type"]: ""} if part["type"] != "text" else part for part in ask.messages[-1]["content"]]
    messages = [*ask.messages[:-1], {"role": "user", "content": parts}]
    text: str = processor.tokenizer.apply_chat_template(
        messages, chat_template=processor._template, add_generation_prompt=True, tokenize=False
    )
    return text


def outputs_of(
    driver: Any, asked: list[Any], journal: tuple[Decisions, ...] = (), *, downstream: bool = True, **more: Any
) -> list[Any]:
    params = {"max_tokens": 8, "ignore_eos": True, **more}
    driver.engine.start(StageRequest(1, (CLIENT,), params, downstream=downstream, journal=journal))
    driver.live.add(1)
    try:
        for number, chunk in enumerate(asked):
            driver.feed(1, *chunk, last=number == len(asked) - 1)
    except InvalidRequest:
        driver.live.discard(1)
        raise
    outputs: list[Any] = driver.run()[1]
    assert not any(isinstance(output, StageFailure) for output in outputs), outputs
    return outputs


def answer(driver: Any, asked: list[Any], *, downstream: bool = True) -> tuple[str, int]:
    """The text, and the number of tokens of the prompt."""
    outputs = outputs_of(driver, asked, downstream=downstream)
    return "".join(output.data.get("text", "") for output in outputs), outputs[-1].data["prompt_tokens"]


@pytest.mark.parametrize("ask", [Ask(STORY), SHOWN], ids=["text", "media"])
def test_a_raw_prompt_is_answered_like_its_conversation(engine: Any, driver: Any, ask: Ask) -> None:
    expected, text = answer(driver, ask.chunks), rendered(engine, ask)
    ids = np.array(engine._processor.tokenizer.encode(text))
    for prompt in (({"prompt": text}, {}), ({}, {"token_ids": ids})):
        assert answer(driver, [prompt if "messages" in chunk[0] else chunk for chunk in ask.chunks]) == expected


@pytest.mark.parametrize("order", ["audio image", "audio text image", "text audio image text text"])
def test_media_without_marks_fail_their_own_request(engine: Any, driver: Any, order: str) -> None:
    """vLLM counts a token behind each medium, and takes adjacent ones for a video with its sound."""
    processor, expected = engine._processor, answer(driver, Ask(STORY).chunks)
    texts = {**processor._placeholders, "text": "text"}
    prompt = {"prompt": "".join(texts[name] for name in order.split())}
    media = [chunk for chunk in SHOWN.chunks if "messages" not in chunk[0]]
    driver.start(1, downstream=False)
    for chunk in [*media, (prompt, {})]:
        driver.feed(1, *chunk, last="prompt" in chunk[0])
    driver.start(2, max_tokens=8, ignore_eos=True)
    driver.feed(2, *Ask(STORY).chunks[0], last=True)
    outputs = driver.run()
    [failure] = outputs[1]
    assert isinstance(failure, StageFailure)
    assert (failure.error.param, str(failure.error)) == ("prompt", MARKS)
    assert ("".join(each.data.get("text", "") for each in outputs[2]), outputs[2][-1].data["prompt_tokens"]) == expected


def test_variables_of_the_chat_template(engine: Any, driver: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    more = "{% if enable_thinking is false %}<think></think>{% endif %}"
    asked = Ask(STORY)
    plain = outputs_of(driver, asked.chunks, downstream=False)[-1].data["prompt_tokens"]
    for processor in (engine._processor, engine._media_processor):
        monkeypatch.setattr(processor, "_template", processor._template + more)
    assert outputs_of(driver, asked.chunks, downstream=False)[-1].data["prompt_tokens"] == plain
    expected = plain + len(engine._processor.tokenizer.encode("<think></think>"))
    kwargs = {"enable_thinking": False}
    found = outputs_of(driver, asked.chunks, downstream=False, chat_template_kwargs=kwargs)
    assert found[-1].data["prompt_tokens"] == expected
    question = {"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": kwargs}
    tokens = engine.call("tokenize", question)["tokens"]
    assert engine._processor.tokenizer.decode(tokens).endswith("<think></think>")


def test_embeddings_are_answered_like_their_tokens_wherever_they_are_resumed(engine: Any, driver: Any) -> None:
    ids = engine._processor.tokenizer.encode(rendered(engine, Ask(STORY)))
    rows = engine._embed(ids).float().numpy()
    expected = answer(driver, Ask(STORY).chunks, downstream=False)
    assert answer(driver, [({}, {"embeds": rows})], downstream=False) == expected
    whole = outputs_of(driver, [({}, {"embeds": rows})], downstream=False)
    journal = tuple(output.decisions for output in whole)
    for cut in (1, len(whole) // 2, len(whole)):
        resumed = outputs_of(driver, [({}, {"embeds": rows})], journal[:cut], downstream=False)
        assert [(output.data, output.decisions) for output in resumed] == [(o.data, o.decisions) for o in whole]
    for wrong, words in ((rows[:, :3], "rows of 3 numbers"), (rows, "talker needs the tokens")):
        with pytest.raises(InvalidRequest, match=words):
            answer(driver, [({}, {"embeds": wrong})], downstream=wrong is rows)
