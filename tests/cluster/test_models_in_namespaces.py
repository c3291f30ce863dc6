"""Real pipelines whose stages are on two and three nodes, which are network namespaces with a Ray.

Tokens are compared by the rules of ``clear_choices``, which each stage's environment switches on.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import psutil
import pytest
import trio

from omni_actors import AudioChunk, OmniSystem, config
from omni_actors.config import Cluster, Pipeline, Restart, Stage
from omni_actors.outputs import Output
from omni_actors.stages import assets
from tests.cluster.long_answers import wait_ended
from tests.cluster.ray_namespaces import RayNodes, ray_on
from tests.support.closeness import assert_same_sound
from tests.support.echo_systems import pid_of
from tests.support.network import namespaces
from tests.support.slow_lines import slow_lines
from tests.support.spoken_answers import SPOKEN, STORY, read, sound_of, text_of
from tests.support.worker_environment import clear_choices
from tiny_models import qwen3 as tiny

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.usefixtures("needs_slow_lines"),
]
WATCHDOG_S = 120.0
OMNI = {
    "two nodes": {"thinker": "head", "talker": "n1", "code2wav": "n1"},
    "three nodes": {"thinker": "n1", "talker": "n2", "code2wav": "head"},
}
VOICE = {
    "two nodes": {"whisper": "head", "llm": "n1", "acoustic": "head", "vocoder": "head"},
    "three nodes": {"whisper": "n2", "llm": "n1", "acoustic": "n2", "vocoder": "head"},
}
LINES = (0.001, None), (0.01, 100_000_000)
"""Seconds of delay of each way, and bits a second."""
SPOKEN_QUESTION = "Why is the sky blue?"


@pytest.fixture(scope="module")
def ray() -> Iterator[RayNodes]:
    with namespaces(3) as nodes, ray_on(nodes) as started:
        yield started


@pytest.fixture(autouse=True)
def _on_the_heads_node(ray: RayNodes, fixture_processes: set[int]) -> Iterator[None]:
    """Run the test there. What Ray keeps at its end belongs to the cluster."""
    with ray.nodes["head"].entered():
        yield
    fixture_processes |= ray.pids() - ray.agents_and_workers()


def with_clear_choices(pipeline: Pipeline) -> Pipeline:
    changed = {"threads": 1, "env": clear_choices(), "restart": Restart(intensity=100)}
    stages = {name: msgspec.structs.replace(stage, **changed) for name, stage in pipeline.stages.items()}
    return msgspec.structs.replace(pipeline, stages=stages)


@pytest.fixture(scope="module")
def omni_pipeline(tmp_path_factory: pytest.TempPathFactory) -> Pipeline:
    model = str(tiny.save(tmp_path_factory.mktemp("omni"), text_eos=0.0, codec_eos=0.0))
    stages = {
        "thinker": Stage(engine="qwen3_thinker", model=model, accepts=("messages",), emits="text"),
        "talker": Stage(engine="qwen3_talker", model=model, inputs=("thinker",)),
        "code2wav": Stage(engine="qwen3_code2wav", model=model, inputs=("talker",), emits="audio"),
    }
    return with_clear_choices(Pipeline(name="tiny", stages=stages))


@pytest.fixture(scope="module")
def voice_pipeline() -> Pipeline:
    for model in assets.NAMES:
        assets.prepare(model, print)
    return with_clear_choices(config.load("voice"))


@asynccontextmanager
async def on_nodes(ray: RayNodes, pipeline: Pipeline, nodes: Mapping[str, str]) -> AsyncIterator[OmniSystem]:
    """Open a pipeline with each stage on its node, and check that it is there and that nothing is left of it."""
    placed = msgspec.structs.replace(pipeline, cluster=Cluster(nodes=nodes))
    async with OmniSystem.open(placed, cluster=ray.address) as omni:
        assert {stage: ray.node_of(pid_of(omni, stage)) for stage in nodes} == nodes
        yield omni
    with trio.fail_after(WATCHDOG_S):
        while left := ray.agents_and_workers():
            await wait_ended(*left)


async def tell(omni: OmniSystem, on_audio: Callable[[], None] = lambda: None) -> list[Output]:
    with trio.fail_after(WATCHDOG_S):
        return await read(omni.generate(STORY, **SPOKEN), on_audio)


def assert_same_answer(outputs: list[Output], expected: list[Output]) -> None:
    assert text_of(outputs) == text_of(expected)
    assert_same_sound(sound_of(outputs), sound_of(expected))


@pytest.mark.parametrize("layout", OMNI)
async def test_qwen3_omni_answers_as_on_one_machine(ray: RayNodes, omni_pipeline: Pipeline, layout: str) -> None:
    async with OmniSystem.open(omni_pipeline) as omni:
        expected = await tell(omni)
    assert len(sound_of(expected)) == 60 * 1920 - 555
    async with on_nodes(ray, omni_pipeline, OMNI[layout]) as omni:
        assert_same_answer(await tell(omni), expected)
        for delay_s, bits_per_s in LINES:
            with slow_lines(list(ray.nodes.values()), delay_s, bits_per_s):
                assert_same_answer(await tell(omni), expected)
        killed = psutil.Process(pid_of(omni, "talker"))
        if layout == "three nodes":
            killed = psutil.Process(killed.ppid())  # the agent
        assert_same_answer(await tell(omni, killed.kill), expected)


async def hear(
    omni: OmniSystem, question: Mapping[str, Any], on_audio: Callable[[], None] = lambda: None
) -> list[Output]:
    modalities = ("transcript", "text", "audio") if "multi_modal_data" in question else ("text", "audio")
    with trio.fail_after(WATCHDOG_S):
        return await read(omni.generate(modalities=modalities, max_tokens=24, seed=3, **question), on_audio)


@pytest.mark.voice
@pytest.mark.parametrize("layout", VOICE)
async def test_voice_answers_as_on_one_machine(ray: RayNodes, voice_pipeline: Pipeline, layout: str) -> None:
    spoken: dict[str, Any] = {}
    questions: list[dict[str, Any]] = [{"prompt": "Name a famous painter."}, spoken]
    async with OmniSystem.open(voice_pipeline) as omni:
        question = await read(omni.generate(script=SPOKEN_QUESTION, modalities=("audio",), seed=0))
        spoken["multi_modal_data"] = {"audio": AudioChunk(sound_of(question), 24_000)}
        expected = [await hear(omni, question) for question in questions]
    assert "sky" in text_of(expected[1])
    async with on_nodes(ray, voice_pipeline, VOICE[layout]) as omni:
        for question, answer in zip(questions, expected, strict=True):
            assert_same_answer(await hear(omni, question), answer)
        for delay_s, bits_per_s in LINES:
            with slow_lines(list(ray.nodes.values()), delay_s, bits_per_s):
                assert_same_answer(await hear(omni, spoken), expected[1])
        for stage in ("llm", "acoustic", "vocoder"):
            killed = psutil.Process(pid_of(omni, stage))
            if layout == "three nodes" and VOICE[layout][stage] != "head":  # the head's node is this process's
                killed = psutil.Process(killed.ppid())  # the agent
            assert_same_answer(await hear(omni, spoken, killed.kill), expected[1])
