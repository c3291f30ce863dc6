"""Pooled hidden states of the llm engine, against transformers' own forward; and its tokenizer's capabilities."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from omni_actors.stages.base import CLIENT, InvalidRequest, StageRequest
from omni_actors.stages.llm.engine import LLMEngine
from tests.stages.llm.tiny_engine import CONTEXT, PROMPTS, assert_empty, transformers_of, user
from tests.support.engine_driver import Driver


@torch.inference_mode()
def expected(path: Path, text: str, pooling: str) -> torch.Tensor:
    tokenizer, model = transformers_of(path)
    ids = tokenizer(text, return_tensors="pt").input_ids
    hidden = model.get_decoder()(ids).last_hidden_state[0]
    return hidden.mean(0) if pooling == "mean" else hidden[-1]


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_embeddings_are_those_of_transformers(
    drive: Callable[..., Driver], engine: LLMEngine, tiny: Path, pooling: str, normalize: bool
) -> None:
    """In one batch, with prompts of less and of more than a prefill chunk, beside a request that writes text."""
    driver = drive(engine)
    for number, text in enumerate(PROMPTS):
        driver.start(number, downstream=False, pooling=pooling, normalize=normalize)
        driver.feed(number, {"prompt": text}, last=True)
    driver.start(100, max_tokens=20)
    driver.feed(100, user("hello"), last=True)
    found = driver.run()
    for number, text in enumerate(PROMPTS):
        [output] = found[number]
        vector = expected(tiny, text, pooling)
        vector = vector / vector.norm() if normalize else vector
        np.testing.assert_allclose(output.tensors["embedding"], vector.numpy(), rtol=2e-4, atol=2e-5)
        assert output.data == {"prompt_tokens": len(transformers_of(tiny)[0].encode(text))}
        assert output.last
    assert found[100][-1].data["completion_tokens"] == 20
    assert_empty(engine)


def test_an_embedding_is_for_the_client_alone(engine: LLMEngine) -> None:
    with pytest.raises(InvalidRequest, match="downstream stages read text"):
        engine.start(StageRequest(0, (CLIENT,), {"pooling": "mean"}, downstream=True))


def test_tokens_and_texts_are_those_of_the_tokenizer(engine: LLMEngine, tiny: Path) -> None:
    tokenizer, _ = transformers_of(tiny)
    messages = user("what?")["messages"]
    for arguments, tokens in (
        ({"prompt": "the sea"}, tokenizer.encode("the sea")),
        ({"prompt": "the sea", "add_special_tokens": False}, tokenizer.encode("the sea", add_special_tokens=False)),
        (
            {"messages": messages},
            tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False),
        ),
    ):
        found = engine.call("tokenize", arguments)
        strings = tokenizer.convert_ids_to_tokens(tokens)
        assert found == {"tokens": tokens, "token_strs": strings, "max_model_len": CONTEXT}
        assert engine.call("detokenize", {"tokens": tokens}) == tokenizer.decode(tokens)


@pytest.mark.parametrize(
    ("capability", "arguments"),
    [
        ("tokenize", {}),
        ("tokenize", {"prompt": "a", "messages": []}),
        ("tokenize", {"prompt": 7}),
        ("tokenize", {"text": "a"}),
        ("tokenize", {"messages": [{"role": "user"}]}),
        ("tokenize", {"messages": [{"role": "user", "content": ""}]}),
        ("detokenize", {}),
        ("detokenize", {"tokens": [-1]}),
        ("detokenize", {"tokens": [10**6]}),
        ("detokenize", {"tokens": "abc"}),
    ],
)
def test_wrong_arguments_are_refused(engine: LLMEngine, capability: str, arguments: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        engine.call(capability, arguments)
