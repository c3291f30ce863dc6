"""Omni pipelines with a thinker on vLLM against transformers' ``generate``: the same tokens, codes and samples.

The cases and the comparisons are those of ``tests/stages/qwen3/test_parity.py`` and of its like. Prefill chunks have 64
tokens, except in the test of a video's sound.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from typing import Any

import pytest

from omni_actors.errors import InvalidRequest
from tests.support.omni_questions import ASKS, STORY, Ask, sixteen
from tests.support.qwen2_5_chain import Qwen25Chain
from tests.support.qwen3_chain import Qwen3Chain
from tiny_models import vllm as tiny

pytestmark = pytest.mark.usefixtures("clear_choices")

WHOLE = {"disable_chunked_mm_input": True, "max_num_batched_tokens": 2048, "max_model_len": 2048}


FAMILIES: dict[str, tuple[Any, Callable[..., Any], str, dict[str, Any]]] = {
    "qwen3": (Qwen3Chain, tiny.qwen3, "qwen3_thinker", {"seed": 26}),
    "qwen2_5": (Qwen25Chain, tiny.qwen2_5, "qwen2_5_thinker", {"seed": 1}),
}


@pytest.fixture(scope="module", params=[*FAMILIES])
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def pipeline(
    family: str, open_stage: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., Any]]:
    """Return a function from ``engine_args`` to the family's pipeline with its thinker on vLLM, one open at a time."""
    make, save, thinker, options = FAMILIES[family]
    directory = save(tmp_path_factory.mktemp(family), **options)
    with ExitStack() as opened:
        made: dict[str, Any] = {}

        def open_engine(name: str, *args: Any, engine_args: dict[str, Any], **more: Any) -> Any:
            if name == thinker:
                name, more = f"vllm_{name}", {"engine_args": engine_args}
            return opened.enter_context(closing(open_stage(name, *args, **more)))

        def get(**engine_args: Any) -> Any:
            if repr(engine_args) not in made:
                opened.close()
                made.clear()
                made[repr(engine_args)] = make(
                    directory, functools.partial(open_engine, engine_args=engine_args), ({}, {})
                )
            return made[repr(engine_args)]

        yield get


SERVED = [ask for ask in ASKS if not ask.use_audio_in_video]
LONG = Ask(STORY * 14, max_tokens=6, max_frames=8)
"""Longer than a chunk of prompt rows for the talker."""


@pytest.mark.parametrize("ask", [*SERVED, LONG])
def test_an_answer_equals_the_references(family: str, pipeline: Callable[..., Any], ask: Ask) -> None:
    ours = pipeline()
    if family == "qwen2_5":
        ask = ask._replace(speaker="Chelsie")
    ours.check(ask, *ours.answers([ask]))


@pytest.mark.parametrize("seed", [0, 1])
def test_sixteen_concurrent_requests_are_answered_as_each_alone(
    family: str, pipeline: Callable[..., Any], seed: int
) -> None:
    """Eight of them are in the batch: they join when others leave, and prefill chunks alternate."""
    order = random.Random(seed)
    asks = [ask for ask in sixteen(order) if not ask.use_audio_in_video]
    if family == "qwen2_5":
        asks = [ask._replace(speaker="Chelsie") for ask in asks]
    ours = pipeline()
    for ask, result in zip(asks, ours.answers(asks, order if seed else None), strict=True):
        ours.check(ask, result)


def test_requests_that_vllm_preempts_lose_no_row(family: str, pipeline: Callable[..., Any]) -> None:
    """The cache has room for a few of eight requests: vLLM preempts the others and computes them again."""
    asks = [Ask(STORY + STORY[:n], max_tokens=40, max_frames=9, speaker="Chelsie") for n in range(8)]
    ours = pipeline(block_size=32, max_model_len=256, num_gpu_blocks_override=12, disable_log_stats=False)
    for ask, result in zip(asks, ours.answers(asks), strict=True):
        ours.check(ask, result)
    [preempted] = [metric for metric in ours.thinker._llm.get_metrics() if metric.name == "vllm:num_preemptions"]
    assert preempted.value > 0


def test_a_videos_sound_is_used_only_if_vllm_does_not_cut_the_video(family: str, pipeline: Callable[..., Any]) -> None:
    ask = next(ask for ask in ASKS if ask.use_audio_in_video)
    with pytest.raises(InvalidRequest, match=r"disable_chunked_mm_input|without their sound") as refused:
        pipeline().answers([ask])
    assert refused.value.param == "use_audio_in_video"
    if family == "qwen3":
        ours = pipeline(**WHOLE)
        ours.check(ask, *ours.answers([ask]))
