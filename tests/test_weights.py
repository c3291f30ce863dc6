"""New weights for a running system: versions of outputs, deaths, refusals, with real workers."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio
from safetensors.numpy import load_file as load_numpy_file
from safetensors.torch import load_file as load_torch_file

from omni_actors.config import Pipeline, Restart, Stage
from omni_actors.errors import InvalidRequest
from omni_actors.outputs import Answer
from omni_actors.system import OmniSystem
from tests.support.closeness import assert_same_sound
from tests.support.omni_questions import STORY, Ask
from tests.support.open_descriptors import weights_in_memory
from tiny_models.llama import save_model

WATCHDOG_S = 100.0


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("old"), seed=1)


@pytest.fixture(scope="module")
def new(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("new"), seed=2)


@asynccontextmanager
async def opened(model: Path) -> AsyncIterator[OmniSystem]:
    stage = Stage(
        engine="llm",
        model=str(model),
        accepts=("messages",),
        emits="text",
        threads=1,
        options={"context": 128, "max_batch": 4},
    )
    echo = Stage(engine="echo", accepts=("script",), emits="audio")
    pipeline = Pipeline(name="weights", stages={"mind": stage, "echo": echo})
    with trio.fail_after(WATCHDOG_S):
        async with OmniSystem.open(pipeline, overrides={"stages.mind.restart.backoff_s": 0.01}) as omni:
            yield omni


async def ask(omni: OmniSystem, tokens: int = 16) -> Answer:
    return await omni.generate("hello", max_tokens=tokens, temperature=0.0).collect()


def version(answer: Answer) -> Any:
    return answer.data["text"].get("weights_version")


@pytest.mark.slow  # tests/stages/llm/test_weights.py checks the engine, tests/test_control.py the desired state
async def test_new_weights_last_through_a_death_and_a_refusal(old: Path, new: Path, tmp_path: Path) -> None:
    """That the answers are those of the new weights, tests/stages/llm/test_weights.py checks."""
    async with opened(old) as omni:
        before = await ask(omni)
        assert version(before) == "0"
        running = omni.generate("hello", max_tokens=100, temperature=0.0)
        (reply,) = (await omni.update_weights(new, version="two", stages=["mind"]))["mind"]
        assert reply.result()["complete"]
        assert not await omni.is_paused()
        assert version(await running.collect()) == "0", "it was waited for"
        after = await ask(omni)
        assert version(after) == "two"
        assert after.text != before.text
        os.kill(omni.health().stages["mind"][0].pid or 0, signal.SIGKILL)
        again = await ask(omni)
        assert (again.text, version(again)) == (after.text, "two"), "also in a worker that starts later"
        (tmp_path / "bad.safetensors").write_bytes(b"damaged")
        (reply,) = (await omni.update_weights(tmp_path, stages=["mind"]))["mind"]
        assert isinstance(reply.error, InvalidRequest)
        again = await ask(omni)
        assert (again.text, version(again)) == (after.text, "two")
        with pytest.raises(InvalidRequest, match="path"):
            await omni.update_weights(tmp_path / "nothing", stages=["mind"])
        await _check_start_and_finish(omni, before.text, old, new)


@pytest.mark.slow
async def test_tensors_are_weights_too_and_last_through_a_death(old: Path, new: Path) -> None:
    """One part as tensors of torch, the rest as arrays: the answer is that of the new weights."""
    torch_ones = load_torch_file(new / "model.safetensors")
    arrays = load_numpy_file(new / "model.safetensors")
    first = dict(itertools.islice(torch_ones.items(), len(torch_ones) // 2))
    rest = {name: array for name, array in arrays.items() if name not in first}
    async with opened(new) as omni:
        expected = await ask(omni)
    async with opened(old) as omni:
        before = await ask(omni)
        assert before.text != expected.text
        with pytest.raises(InvalidRequest, match="a tensor was expected"):
            await omni.update_weights({"word": "this is none"}, stages=["mind"])
        (refused,) = (await omni.update_weights({"unknown": np.zeros(3, np.float32)}, stages=["mind"]))["mind"]
        assert isinstance(refused.error, InvalidRequest)
        for part in (first, rest):
            (reply,) = (await omni.update_weights(part, stages=["mind"]))["mind"]
            assert reply.result()["updated"] == len(part)
        answer = await ask(omni)
        assert (answer.text, version(answer)) == (expected.text, "update-3")
        assert len(weights_in_memory()) == 1, "the parts are merged"
        os.kill(omni.health().stages["mind"][0].pid or 0, signal.SIGKILL)
        answer = await ask(omni)
        assert (answer.text, version(answer)) == (expected.text, "update-3")
        (reply,) = (await omni.update_weights(arrays, version="whole", stages=["mind"]))["mind"]
        assert reply.result()["complete"]
        assert len(weights_in_memory()) == 1, "the parts that the whole replaces are freed"
    assert not weights_in_memory()


async def _check_start_and_finish(omni: OmniSystem, first: str, old: Path, new: Path) -> None:
    """Between start and finish, new requests wait."""
    with pytest.raises(InvalidRequest, match="keep"):
        await omni.start_weight_update("keep")
    await omni.start_weight_update("abort")
    held = omni.generate("hello", max_tokens=16, temperature=0.0)
    for path, name in ((new, "two"), (old, "three")):
        assert (await omni.update_weights(path, version=name, stages=["mind"]))["mind"][0].error is None
        assert await omni.is_paused()
    await omni.finish_weight_update()
    answer = await held.collect()
    assert (answer.text, version(answer)) == (first, "three")
    await omni.finish_weight_update()
    assert not await omni.is_paused()


@asynccontextmanager
async def opened_omni(model: Path) -> AsyncIterator[OmniSystem]:
    edges: dict[str, dict[str, Any]] = {
        "thinker": {"accepts": ("messages",), "emits": "text"},
        "talker": {"inputs": ("thinker",)},
        "code2wav": {"inputs": ("talker",), "emits": "audio"},
    }
    often = Restart(backoff_s=0.01)
    stages = {
        name: Stage(engine=f"qwen3_{name}", model=str(model), threads=1, restart=often, **edges[name]) for name in edges
    }
    with trio.fail_after(WATCHDOG_S):
        async with OmniSystem.open(Pipeline(name="omni", stages=stages)) as omni:
            yield omni


async def ask_omni(omni: OmniSystem) -> Answer:
    return await omni.generate(
        Ask(STORY).messages,
        modalities=("text", "audio"),
        max_tokens=16,
        temperature=0.0,
        talker_max_tokens=20,
        talker_temperature=0.0,
        speaker="ethan",
    ).collect()


@pytest.mark.slow
@pytest.mark.voice
async def test_new_weights_of_an_omni_model_last_through_deaths(tmp_path: Path) -> None:
    """Text and sound are those of a system that was opened with the new weights, also from workers that start later."""
    from tiny_models import qwen3

    old, new = (qwen3.save(tmp_path / str(seed), seed=seed) for seed in (25, 4))
    async with opened_omni(new) as omni:
        expected = await ask_omni(omni)
    async with opened_omni(old) as omni:
        before = await ask_omni(omni)
        assert before.text != expected.text
        replies = await omni.update_weights(new, version="two", stages=["thinker", "talker", "code2wav"])
        assert all(reply.result()["complete"] for (reply,) in replies.values())
        for killed in ((), ("thinker", "talker", "code2wav")):
            for stage in killed:
                os.kill(omni.health().stages[stage][0].pid or 0, signal.SIGKILL)
            answer = await ask_omni(omni)
            assert answer.text == expected.text
            assert answer.audio is not None
            assert expected.audio is not None
            assert_same_sound(answer.audio.samples, expected.audio.samples)
            assert version(answer) == answer.data["audio"]["weights_version"] == "two"
