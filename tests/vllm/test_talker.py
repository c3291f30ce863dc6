"""Qwen3-Omni's talker on vLLM against transformers' ``generate``, and in the conformance suite.

The cases and the comparisons are those of ``tests/stages/qwen3/test_parity.py`` and ``tests.support.conformance``.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from omni_actors.stages.registry import ENGINES
from tests.support.conformance import EngineConformance
from tests.support.engine_cases import Case, qwen3_talker
from tests.support.engine_driver import Driver
from tests.support.omni_questions import ASKS, Ask, sixteen
from tests.support.qwen3_chain import Qwen3Chain
from tests.support.stage_context import stage_context
from tiny_models import qwen3 as tiny
from tiny_models.vllm import HEADS, SECTION

pytestmark = pytest.mark.usefixtures("clear_choices")

CONTEXT = 1024
ENGINE_ARGS = {"enforce_eager": True, "kv_cache_memory_bytes": 1 << 26, "max_num_batched_tokens": 32}
"""Fewer tokens than a chunk of a prompt has: vLLM computes a chunk in two steps."""


def save(directory: Path, **options: Any) -> Path:
    """Save a checkpoint whose talker has heads of a size that vLLM's attention supports."""
    text_config = tiny.text_config

    def wider(vocabulary: int, layers: int, **more: Any) -> dict[str, Any]:
        made = text_config(vocabulary, layers, **more)
        if vocabulary != tiny.CODEBOOK + tiny.SPECIALS:
            return made
        return {**made, **HEADS, "rope_parameters": {**tiny.MROPE, "mrope_section": SECTION}}

    with mock.patch.object(tiny, "text_config", wider):
        return tiny.save(directory, **options)


@pytest.fixture(scope="module")
def open_engine() -> Iterator[Callable[..., Any]]:
    """Return a function (engine name, model, **options) -> new engine, which opens the talker on vLLM."""
    with ExitStack() as opened:

        def open_one(name: str, model: Path, **options: Any) -> Any:
            if name == "qwen3_talker":
                name = "vllm_qwen3_talker"
                options = {"context": CONTEXT, "prefill_chunk": 48, "engine_args": ENGINE_ARGS}
            return opened.enter_context(closing(open_plain(name, model, **options)))

        yield open_one


def open_plain(name: str, model: Path, **options: Any) -> Any:
    module, _, factory = ENGINES[name].factory.partition(":")
    return getattr(import_module(module), factory)(stage_context(options, stage=name, model=model))


@pytest.fixture(scope="module")
def pipeline(open_engine: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Qwen3Chain:
    return Qwen3Chain(save(tmp_path_factory.mktemp("wide"), seed=1, codec_eos=0.0), open_engine, ({}, {}))


@pytest.fixture(scope="module")
def theirs(pipeline: Qwen3Chain) -> Iterator[Any]:
    """The talker on transformers."""
    with closing(open_plain("qwen3_talker", pipeline.directory, context=CONTEXT)) as engine:
        yield engine


@pytest.fixture(scope="module")
def case() -> Case:
    return qwen3_talker(None)  # type: ignore[arg-type]


@pytest.fixture
def driver(pipeline: Qwen3Chain) -> Driver:
    return Driver(pipeline.talker)


class TestConformance(EngineConformance):
    pass


@pytest.mark.parametrize("ask", ASKS)
def test_an_answer_equals_the_references(pipeline: Qwen3Chain, ask: Ask) -> None:
    pipeline.check(ask, *pipeline.answers([ask]))


@pytest.mark.parametrize("seed", [0, 1])
def test_sixteen_concurrent_requests_are_answered_as_each_alone(pipeline: Qwen3Chain, seed: int) -> None:
    """Eight are in the batch: requests join when others leave, and wait for text while others go on."""
    order = random.Random(seed)
    asks = sixteen(order)
    for ask, result in zip(asks, pipeline.answers(asks, order if seed else None), strict=True):
        pipeline.check(ask, result)


def codes(engine: Any, prompts: Sequence[int], **params: Any) -> list[list[list[int]]]:
    """Return the codes of some prompts of these sizes. A prompt joins per step; its answer gets a row per step."""
    driver, answer = Driver(engine), 20
    outputs: dict[int, list[Any]] = {number: [] for number in range(len(prompts))}
    for step in range(len(prompts) + answer):
        for number, size in enumerate(prompts):
            rows = np.random.default_rng(number).normal(0, 1, (size + answer, 64)).astype(np.float32)
            if step == number:
                driver.start(number, ("thinker",), seed=number, **params)
                once = {"ids": np.arange(size), "is_media": np.arange(size) % 5 == 2, "tts": rows[:3]}
                driver.feed(number, {}, {**once, "rows": rows[:size]}, source="thinker")
            elif number in driver.live and number < step <= number + answer:
                row = rows[size + step - number - 1][None]
                driver.feed(number, {}, {"rows": row}, last=step == number + answer, source="thinker")
        if engine.busy:
            for output in driver.step():
                outputs[output.request_id].append(output)
    for number, more in driver.run().items():
        outputs[number] += more
    assert not driver.live
    return [[output.tensors["codes"][0].tolist() for output in found if output.tensors] for found in outputs.values()]


def test_sampled_codes_are_those_of_the_talker_on_transformers(pipeline: Qwen3Chain, theirs: Any) -> None:
    prompts = [9, 70, 3, 48, 49, 100, 20, 5]
    found = codes(pipeline.talker, prompts, talker_max_tokens=30)
    assert found == codes(theirs, prompts, talker_max_tokens=30)
    assert sum(map(len, found)) > 100


def test_eight_requests_that_fill_their_contexts_do_not_block_each_other(pipeline: Qwen3Chain, theirs: Any) -> None:
    prompts = [CONTEXT - 15 - number for number in range(8)]
    found = codes(pipeline.talker, prompts)
    assert found == codes(theirs, prompts)
    assert max(map(len, found)) > 5
