"""Raw prompts of the llm engine: text without the chat template, token ids, and embeddings."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from omni_actors.stages.autoregressive.options import MOST_CUT
from omni_actors.stages.base import Chunk, Decisions, InvalidRequest
from omni_actors.stages.llm.engine import LLMEngine
from omni_actors.stages.raw_prompt import RawPrompt
from omni_actors.stages.tensors import to_wire
from tests.stages.llm.tiny_engine import CONTEXT, PROMPTS, Results, assert_empty, opened, transformers_of, user
from tests.support.engine_driver import Driver

pytestmark = pytest.mark.usefixtures("clear_choices")

TEXT = "the quick brown fox <|im_start|>jumps"
KINDS = ("prompt", "prompt_token_ids", "prompt_embeds")


def raw_chunk(path: Path, kind: str, tokens: list[int]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return data and tensors of a chunk that has ``TEXT``, or these tokens."""
    if kind == "prompt":
        return {"prompt": TEXT}, {}
    if kind == "prompt_token_ids":
        return {}, {"token_ids": np.array(tokens)}
    table = transformers_of(path)[1].get_input_embeddings().weight.detach().numpy()
    return {}, {"embeds": table[tokens]}


def expected(path: Path, max_tokens: int) -> tuple[list[int], str]:
    """The prompt's tokens, and transformers' own greedy continuation."""
    tokenizer, model = transformers_of(path)
    batch = tokenizer(TEXT, return_tensors="pt")
    size = batch["input_ids"].shape[1]
    tokens = model.generate(batch["input_ids"], max_new_tokens=max_tokens, do_sample=False)[0].tolist()
    return tokens[:size], tokenizer.decode(tokens[size:], skip_special_tokens=True)


@pytest.fixture
def driver(drive: Callable[..., Driver], engine: LLMEngine) -> Driver:
    return drive(engine)


def answer(driver: Driver, chunk: Any, journal: Sequence[Decisions] = (), **params: Any) -> list[Any]:
    driver.start(0, journal=tuple(journal), **params)
    driver.feed(0, *chunk, last=True)
    outputs: list[Any] = driver.run()[0]
    return outputs


@pytest.mark.parametrize("kind", KINDS)
def test_a_raw_prompt_is_continued_as_transformers_continues_it(driver: Driver, tiny: Path, kind: str) -> None:
    """Its forwards are prefill chunks of 7 positions, so the prompt takes several."""
    tokens, text = expected(tiny, 12)
    assert len(tokens) > 14
    outputs = answer(driver, raw_chunk(tiny, kind, tokens), max_tokens=12)
    assert "".join(output.data["text"] for output in outputs) == text
    assert outputs[-1].data["prompt_tokens"] == len(tokens)


@pytest.mark.parametrize("kind", KINDS)
def test_an_answer_to_a_raw_prompt_is_the_same_wherever_it_is_resumed(driver: Driver, tiny: Path, kind: str) -> None:
    chunk = raw_chunk(tiny, kind, expected(tiny, 1)[0])
    params = {"temperature": 1.0, "seed": 3, "max_tokens": 20}
    whole = answer(driver, chunk, **params)
    journal = [output.decisions for output in whole]
    for cut in range(0, len(whole) + 1, 3):
        assert answer(driver, chunk, journal[:cut], **params) == whole, f"cut {cut}"


def test_raw_prompts_and_conversations_share_a_batch(driver: Driver, engine: LLMEngine, tiny: Path) -> None:
    tokens, text = expected(tiny, 12)
    driver.start(9, max_tokens=12)
    driver.feed(9, user(PROMPTS[2]), last=True)
    alone = driver.run()[9]
    for number, kind in enumerate(KINDS):
        driver.start(number, max_tokens=12)
        driver.feed(number, *raw_chunk(tiny, kind, tokens), last=True)
    driver.start(9, max_tokens=12)
    driver.feed(9, user(PROMPTS[2]), last=True)
    found = driver.run()
    assert found[9] == alone
    assert {"".join(output.data["text"] for output in found[number]) for number in range(len(KINDS))} == {text}


def test_the_parts_of_several_chunks_are_joined(driver: Driver, tiny: Path) -> None:
    tokens, text = expected(tiny, 12)
    for kind in ("prompt_token_ids", "prompt_embeds"):
        driver.start(0, max_tokens=12)
        driver.feed(0, *raw_chunk(tiny, kind, tokens[:5]))
        driver.feed(0, *raw_chunk(tiny, kind, tokens[5:]), last=True)
        assert "".join(output.data["text"] for output in driver.run()[0]) == text


@pytest.mark.parametrize(
    ("data", "tensors", "params", "param", "words"),
    [
        ({"prompt": ""}, {}, {}, "messages", "no tokens"),
        ({"prompt": 3}, {}, {}, "prompt", "expected text"),
        ({"prompt": "a", **user("b")}, {}, {}, "prompt", "no messages"),
        ({"prompt": "a"}, {"token_ids": np.array([1])}, {}, "prompt", "not several"),
        ({"prompt": "a b " * 600}, {}, {}, "messages", "context holds"),
        ({}, {"token_ids": np.array([1, 10**6])}, {}, "prompt_token_ids", "no token 1000000"),
        ({}, {"token_ids": np.array([1, -1])}, {}, "prompt_token_ids", "no token -1"),
        ({}, {"token_ids": np.array([1.0])}, {}, "prompt_token_ids", "float64"),
        ({}, {"token_ids": np.array([[1]])}, {}, "prompt_token_ids", "int64"),
        ({}, {"token_ids": np.ones(CONTEXT, np.int64)}, {}, "messages", "context holds"),
        ({}, {"embeds": np.ones((4, 31), np.float32)}, {}, "embeds", "rows of 31 numbers; the model takes 32"),
        ({}, {"embeds": np.ones((CONTEXT, 32), np.float32)}, {}, "messages", "embeddings"),
        ({}, {"embeds": np.full((4, 32), np.nan, np.float32)}, {}, "embeds", "finite"),
        ({}, {"embeds": np.full((4, 32), 1e300)}, {}, "embeds", "not finite as float32"),
        ({}, {"embeds": np.ones((4, 32), np.float32)}, {"repetition_penalty": 1.2}, "repetition_penalty", "have none"),
    ],
)
def test_a_wrong_raw_prompt_is_refused(
    engine: LLMEngine,
    driver: Driver,
    data: dict[str, Any],
    tensors: dict[str, Any],
    params: dict[str, Any],
    param: str,
    words: str,
) -> None:
    driver.start(0, **params)
    with pytest.raises(InvalidRequest, match=words) as refused:
        driver.feed(0, data, tensors, last=True)
    assert refused.value.param == param
    driver.live.discard(0)
    assert_empty(engine)


@pytest.mark.parametrize(
    ("sent", "number", "taken"),
    [
        (torch.float64, 1e300, torch.float32),
        (torch.float32, 1e5, torch.float16),
        (torch.float32, 3.4e38, torch.bfloat16),
    ],
)
def test_embeddings_beyond_the_range_of_the_model_are_refused(
    sent: torch.dtype, number: float, taken: torch.dtype
) -> None:
    embeds = {"embeds": to_wire(torch.full((3, 8), number, dtype=sent))}
    prompt = RawPrompt()
    prompt.feed(Chunk(source="client", seq=0, last=True, tensors=embeds, data={}))
    with pytest.raises(InvalidRequest, match=f"not finite as {str(taken).removeprefix('torch.')}") as refused:
        prompt.embeds(8, taken, 1.0)
    assert refused.value.param == "embeds"


def test_a_raw_prompt_has_no_place_for_a_transcript(engine: LLMEngine, driver: Driver) -> None:
    driver.start(0, sources=("client", "ear"))
    driver.feed(0, {"prompt": "a"}, last=True)
    with pytest.raises(InvalidRequest, match="no place for its transcript"):
        driver.feed(0, {"text": "b"}, last=True, source="ear")
    driver.live.discard(0)
    assert_empty(engine)


def test_results_of_hostile_embeddings_fail_their_own_request(driver: Driver) -> None:
    """Numbers so large that no logit is finite."""
    driver.start(0)
    driver.feed(0, tensors={"embeds": np.full((4, 32), 3e38, np.float32)}, last=True)
    results = Results()
    while driver.engine.busy:
        results.step(driver.engine)  # type: ignore[arg-type]
    assert 0 in results.failed or 0 in results.ends
    driver.live.discard(0)


def test_a_prompt_is_cut_where_the_client_asks_for_it(driver: Driver, tiny: Path) -> None:
    tokens, _ = expected(tiny, 1)
    for side, kept in (("left", tokens[-9:]), ("right", tokens[:9])):
        kwargs = {"truncation": True, "max_length": 9, "truncation_side": side}
        cut = answer(driver, raw_chunk(tiny, "prompt", tokens), tokenization_kwargs=kwargs, max_tokens=5)
        assert cut == answer(driver, raw_chunk(tiny, "prompt_token_ids", kept), max_tokens=5)
        whole = answer(driver, (user(TEXT), {}), tokenization_kwargs={**kwargs, "max_length": 90}, max_tokens=5)
        assert whole == answer(driver, (user(TEXT), {}), max_tokens=5)
        assert answer(driver, (user(TEXT), {}), tokenization_kwargs=kwargs)[-1].data["prompt_tokens"] == 9


def test_the_tokenizers_own_special_tokens_may_be_left_out(
    engine: LLMEngine, driver: Driver, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer, tokens = engine._vocabulary.tokenizer, expected(tiny, 1)[0]

    class WithBegin:
        def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
            return [tokens[0]] * add_special_tokens + tokenizer.encode(text, add_special_tokens=False)

        def __getattr__(self, name: str) -> Any:
            return getattr(tokenizer, name)

    monkeypatch.setattr(engine._vocabulary, "tokenizer", WithBegin())
    for added in (True, False):
        outputs = answer(driver, ({"prompt": TEXT}, {}), tokenization_kwargs={"add_special_tokens": added})
        assert outputs[-1].data["prompt_tokens"] == len(tokens) + added


LONG = TEXT * 150
"""A text of more characters than a prompt of the context can have."""


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_long_prompt_is_cut_and_not_refused(engine: LLMEngine, driver: Driver, tiny: Path, side: str) -> None:
    ids = engine._vocabulary.tokenizer.encode(LONG)
    kept = ids[-9:] if side == "left" else ids[:9]
    expected = answer(driver, ({}, {"token_ids": np.array(kept)}), max_tokens=5)
    kwargs = {"truncation": True, "max_length": 9, "truncation_side": side}
    params: dict[str, Any] = {"tokenization_kwargs": kwargs, "max_tokens": 5}
    assert answer(driver, ({"prompt": LONG}, {}), **params) == expected
    assert answer(driver, (user(LONG), {}), **params)[-1].data["prompt_tokens"] == 9
    many = {"messages": [{"role": "user", "content": "a"}] * (CONTEXT + 1)}
    assert answer(driver, (many, {}), **params)[-1].data["prompt_tokens"] == 9
    guided = answer(driver, ({"prompt": LONG}, {}), guidance_scale=2.0, negative_prompt=LONG, **params)
    assert guided[-1].data["prompt_tokens"] == 9


@pytest.mark.parametrize(
    ("data", "tensors", "kwargs"),
    [
        ({"prompt": LONG}, {}, {"max_length": 9}),
        ({"prompt": LONG}, {}, {"truncation": True}),
        ({"prompt": LONG}, {}, {"truncation": True, "max_length": CONTEXT}),
        (user(LONG), {}, {"truncation": True, "max_length": CONTEXT}),
        ({}, {"token_ids": np.ones(CONTEXT, np.int64)}, {"truncation": True, "max_length": 9}),
    ],
)
def test_a_prompt_that_is_not_cut_enough_is_refused(
    engine: LLMEngine, driver: Driver, data: dict[str, Any], tensors: dict[str, Any], kwargs: dict[str, Any]
) -> None:
    driver.start(0, tokenization_kwargs=kwargs)
    with pytest.raises(InvalidRequest, match="context holds"):
        driver.feed(0, data, tensors, last=True)
    driver.live.discard(0)
    assert_empty(engine)


@pytest.mark.parametrize("form", ["prompt", "text of a message", "messages"])
def test_a_prompt_too_long_to_be_tokenized_is_refused_before_it_is_cut(
    engine: LLMEngine, driver: Driver, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    text = "a" * (MOST_CUT * engine._vocabulary.longest + 1)
    data = {"prompt": {"prompt": text}, "text of a message": user(text)}.get(form)
    data = data or {"messages": [{"role": "user", "content": "a"}] * (MOST_CUT + 1)}
    monkeypatch.setattr(engine._vocabulary.tokenizer.__class__, "encode", None)
    driver.start(0, tokenization_kwargs={"truncation": True, "max_length": 9})
    with pytest.raises(InvalidRequest, match="context holds") as refused:
        driver.feed(0, data, {}, last=True)
    assert refused.value.code == "context_length_exceeded"
    driver.live.discard(0)
    assert_empty(engine)


@pytest.fixture(scope="module")
def padded(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLMEngine]:
    """Yield an engine whose tokenizer has a token more than its model."""
    path = tmp_path_factory.mktemp("padded")
    shutil.copytree(tiny, path, dirs_exist_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    tokenizer.add_tokens(["<more>"])
    tokenizer.save_pretrained(path)
    with closing(opened(path)) as engine:
        yield engine


@pytest.mark.parametrize(
    ("data", "tensors", "params", "param"),
    [
        (user("a <more>"), {}, {}, "messages"),
        ({"prompt": "a <more>"}, {}, {}, "prompt"),
        ({}, {"token_ids": np.array([1, 283])}, {}, "prompt_token_ids"),
        (user("a"), {}, {"guidance_scale": 2.0, "negative_prompt": "<more>"}, "negative_prompt"),
        (user("a"), {}, {"logit_bias": {"283": 1}}, "logit_bias"),
    ],
)
def test_a_token_that_the_model_lacks_fails_its_own_request(
    padded: LLMEngine,
    drive: Callable[..., Driver],
    data: dict[str, Any],
    tensors: dict[str, Any],
    params: dict[str, Any],
    param: str,
) -> None:
    driver = drive(padded)
    driver.start(1, max_tokens=5)
    driver.feed(1, user("hello"), last=True)
    driver.start(0, **params)
    with pytest.raises(InvalidRequest, match="no token 283; it has 283") as refused:
        driver.feed(0, data, tensors, last=True)
    assert refused.value.param == param
    driver.live.discard(0)
    assert driver.run()[1][-1].last
