"""Raw prompts, and what a pipeline's stages can take, checked before anything is sent."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from omni_actors import OmniSystem, prompts
from omni_actors.config import Pipeline, Stage
from omni_actors.errors import InvalidRequest, Unsupported
from omni_actors.orchestrator.routes import Node, plan
from omni_actors.system.capabilities import require_raw_prompt
from tests.support.shared_system import SharedSystem, open_shared_system, with_shared_system

IMAGE = np.zeros((4, 4, 3), np.uint8)


def echo() -> Pipeline:
    accepts = ("messages", "image")
    return Pipeline(name="echo", stages={"only": Stage(engine="echo", accepts=accepts, emits="text")})


@pytest.fixture(scope="module")
def shared_system(fixture_processes: set[int]) -> Iterator[SharedSystem]:
    with open_shared_system(lambda: OmniSystem.open(echo()), fixture_processes) as shared_system:
        yield shared_system


@with_shared_system
async def test_a_raw_prompt_reaches_the_stage_as_it_is(omni: OmniSystem) -> None:
    assert await omni.generate({"prompt": "<|im_start|>a"}).text() == "<|im_start|>a"
    [output] = [output async for output in omni.generate({"prompt_token_ids": range(3, 6)})]
    np.testing.assert_array_equal(output.tensors["token_ids"].numpy(), [3, 4, 5])
    assert output.tensors["token_ids"].dtype == "int64"
    rows = np.arange(6, dtype=np.float16).reshape(2, 3)
    for embeds in (rows, torch.tensor(rows), torch.tensor(rows).bfloat16(), rows[:, ::-1][:, ::-1]):
        [output] = [output async for output in omni.generate({"prompt_embeds": embeds})]
        np.testing.assert_array_equal(output.tensors["embeds"].numpy(), rows)


@with_shared_system
async def test_a_prompt_may_bring_its_own_media(omni: OmniSystem) -> None:
    for prompt in ({"prompt": "a"}, {"messages": [{"role": "user", "content": "a"}]}):
        outputs = [output async for output in omni.generate({**prompt, "multi_modal_data": {"image": IMAGE}})]
        assert [set(output.tensors) for output in outputs] == [{"image"}, set()]
        assert outputs[-1].data["text"] == "a"


@pytest.mark.parametrize(
    ("prompt", "param", "words"),
    [
        ({"prompt": 3}, "prompt", "expected text"),
        ({"prompt": "a", "prompt_token_ids": [1]}, "prompt", "both were given"),
        ({"prompt": "a", "temperature": 1}, "prompt", "unknown key 'temperature'"),
        ({"messages": "a"}, "messages", "a list of messages"),
        ({"messages": [1]}, "prompt", "a list of messages"),
        ({"prompt_token_ids": []}, "prompt_token_ids", "token ids"),
        ({"prompt_token_ids": [[1]]}, "prompt_token_ids", "token ids"),
        ({"prompt_token_ids": [1.5]}, "prompt_token_ids", "float64"),
        ({"prompt_token_ids": [-1]}, "prompt_token_ids", "token ids"),
        ({"prompt_token_ids": [2**31]}, "prompt_token_ids", "token ids"),
        ({"prompt_token_ids": [2**70]}, "prompt_token_ids", "object"),
        ({"prompt_token_ids": [[1], [2, 3]]}, "prompt_token_ids", "array"),
        ({"prompt_embeds": np.zeros(3, np.float32)}, "prompt_embeds", "found float32"),
        ({"prompt_embeds": np.zeros((3, 3), np.int32)}, "prompt_embeds", "found int32"),
        ({"prompt_embeds": np.zeros((0, 3))}, "prompt_embeds", "found float64"),
        ({"prompt_embeds": np.zeros((1, 3)), "multi_modal_data": {"image": IMAGE}}, "prompt_embeds", "no media"),
    ],
)
def test_a_wrong_prompt_is_refused(prompt: Any, param: str, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words) as refused:
        prompts.pieces(prompt, None)
    assert refused.value.param == param


def test_media_are_given_once() -> None:
    with pytest.raises(InvalidRequest, match="multi_modal_data"):
        prompts.pieces({"prompt": "a", "multi_modal_data": {"image": IMAGE}}, {"image": IMAGE})


def test_what_is_a_list_of_prompts() -> None:
    conversation = [{"role": "user", "content": "a"}]
    for one in ("a", conversation, [], {"prompt": "a"}, {"messages": conversation}, None, [1, 2]):
        assert not prompts.is_list_of_prompts(one)
    for several in (["a", "b"], [conversation], [{"prompt": "a"}], [{"prompt_token_ids": [1]}, "b"], ("a",)):
        assert prompts.is_list_of_prompts(several)


def chain(engine: str, **options: Any) -> Pipeline:
    """An ear, a model that takes prompts, and a voice."""
    stages = {
        "ear": Stage(engine="whisper", accepts=("audio",), emits="transcript"),
        "model": Stage(engine=engine, accepts=("messages",), inputs=("ear",), emits="text", options=options),
        "voice": Stage(engine="hibari_acoustic", inputs=("model",), emits="audio"),
    }
    return Pipeline(name="chain", stages=stages)


EMBEDDED = {"engine_args": {"enable_prompt_embeds": True}}
ALL = frozenset(prompts.RAW)


@pytest.mark.parametrize(
    ("pipeline", "kinds", "modalities", "supported"),
    [
        (chain("llm"), ["messages"], ["text", "audio"], ALL),
        (chain("llm"), ["messages", "audio"], ["text"], set()),
        (chain("qwen3_thinker"), ["messages"], ["text"], ALL),
        (chain("qwen3_thinker"), ["messages"], ["text", "audio"], ALL - {"prompt_embeds"}),
        (chain("vllm"), ["messages"], ["text"], ALL - {"prompt_embeds"}),
        (chain("vllm", **EMBEDDED), ["messages"], ["text", "audio"], ALL),
        (chain("vllm", **EMBEDDED, role="prefill"), ["messages"], ["text", "audio"], ALL - {"prompt_embeds"}),
        (chain("vllm_qwen3_thinker", **EMBEDDED), ["messages"], ["audio"], ALL - {"prompt_embeds"}),
        (chain("hibari_acoustic"), ["messages"], ["text"], set()),
        (chain("mine:Engine"), ["messages"], ["text"], ALL),
    ],
)
def test_a_prompt_that_a_stage_cannot_take_is_unsupported(
    pipeline: Pipeline, kinds: list[str], modalities: list[str], supported: set[str]
) -> None:
    nodes = {name: Node(each.accepts, each.inputs, each.emits) for name, each in pipeline.stages.items()}
    route = plan(nodes, kinds, modalities)
    for kind in prompts.RAW:
        if kind in supported:
            require_raw_prompt(pipeline, route, kind)
        else:
            with pytest.raises(Unsupported) as refused:
                require_raw_prompt(pipeline, route, kind)
            assert (refused.value.stage, refused.value.capability) == ("model", kind)
            assert refused.value.why


@pytest.mark.parametrize("media", [np.zeros(4), 5, b"RIFF"])
def test_media_that_are_no_mapping_are_refused(media: Any) -> None:
    for prompt, given in (("a", media), ({"prompt": "a"}, media), ({"prompt": "a", "multi_modal_data": media}, None)):
        with pytest.raises(InvalidRequest, match="expected a mapping from kinds of data") as refusal:
            prompts.pieces(prompt, given)
        assert refusal.value.param == "multi_modal_data"
