"""Prefill apart from decode on vLLM, with a prefix cache and adapters in both stages, and with too small a cache."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from omni_actors.stages.adapters.options import Adapter
from omni_actors.stages.vllm.arguments import WrongEngineArgument
from tests.support.adapters import adapter, write_adapter
from tests.support.engine_driver import Driver, for_stages
from tests.vllm.split_model import ARGS, BLOCK, IDS, ids, save

OPTIONS = {
    **ARGS,
    "enable_prompt_embeds": False,
    "enable_prefix_caching": True,
    "enable_lora": True,
    "max_lora_rank": 8,
}
BEGINNING = np.random.default_rng(0).integers(4, 250, 3 * BLOCK + 5)
PROMPTS = [np.concatenate([BEGINNING, np.random.default_rng(n).integers(4, 250, 5 + 31 * n)]) for n in range(3)]
"""The first three blocks are the same."""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def lora(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Adapter:
    targets = ["q_proj", "v_proj", "o_proj", "down_proj"]
    return adapter(write_adapter(tmp_path_factory.mktemp("adapters") / "a", tiny, targets, seed=1), "a")


def asked(lora: Adapter) -> list[tuple[np.ndarray[Any, Any], dict[str, Any]]]:
    """Each prompt twice, so that the second time all its blocks are in the prefix cache; then with the adapter."""
    plain = [(prompt, IDS) for prompt in (*PROMPTS, *PROMPTS)]
    return [*plain, *((prompt, {**IDS, "lora": msgspec.to_builtins(lora)}) for prompt in PROMPTS)]


def test_a_prefix_cache_and_adapters_change_no_token(open_stage: Callable[..., Any], tiny: Path, lora: Adapter) -> None:
    runs: list[list[Any]] = [[], [], []]
    with closing(open_stage("vllm", tiny, engine_args=OPTIONS)) as engine:
        driver = Driver(engine)
        for prompt, params in asked(lora):
            driver.start(1, **params)
            driver.feed(1, None, {"token_ids": prompt}, last=True)
            runs[0].append(ids(driver.run()[1]))
    with closing(open_stage("vllm", tiny, engine_args=OPTIONS, role="prefill")) as engine:
        driver = Driver(engine)
        for prompt, params in asked(lora):
            driver.start(1, **params)
            driver.feed(1, None, {"token_ids": prompt}, last=True)
            runs[1].append(driver.run()[1])
        assert engine.gauges()["prefix_cache_hits"] > 0
    with closing(open_stage("vllm", tiny, engine_args=OPTIONS, role="decode")) as engine:
        driver = Driver(engine)
        for (_, params), outputs in zip(asked(lora), runs[1], strict=True):
            driver.start(1, ("prefill",), **params)
            for output in outputs:
                driver.feed(1, output.data, for_stages(output), last=output.last, source="prefill")
            runs[2].append(ids(driver.run()[1]))
        assert engine.gauges()["prefix_cache_hits"] > 0
    assert runs[2] == runs[0]
    assert runs[0][:3] == runs[0][3:6] != runs[0][6:]
    assert [len(outputs) for outputs in runs[1]] == [-(-len(prompt) // BLOCK) for prompt, _ in asked(lora)]


def test_requests_that_vllm_preempts_are_computed_again(open_stage: Callable[..., Any], tiny: Path) -> None:
    """The cache has 20 blocks. Each of four prompts takes six, and its answer a seventh. They are computed together."""
    small = {"kv_cache_memory_bytes": 20 * BLOCK * 2 * 64 * 4, "scheduler_reserve_full_isl": False}
    options = {**ARGS, **small, "long_prefill_token_threshold": 16}
    prompts = [np.random.default_rng(n).integers(4, 250, 6 * BLOCK - 20) for n in range(4)]
    params = {**IDS, "max_tokens": 40}
    with closing(open_stage("vllm", tiny, engine_args=ARGS)) as engine:
        expected = {n: ids(outputs) for n, outputs in _together(engine, prompts, params).items()}
    with closing(open_stage("vllm", tiny, engine_args=options, role="prefill")) as engine:
        sent = _together(engine, prompts, params)
        preempted = engine.gauges()["num_preemptions"]
    with closing(open_stage("vllm", tiny, engine_args=options, role="decode")) as engine:
        driver = Driver(engine)
        for number, outputs in sent.items():
            driver.start(number, ("prefill",), **params)
            for output in outputs:
                driver.feed(number, output.data, for_stages(output), last=output.last, source="prefill")
        assert {n: ids(outputs) for n, outputs in driver.run().items()} == expected
        gauges = engine.gauges()
        assert gauges["num_preemptions"] > 0
        assert gauges["waiting_prompt_bytes"] == 0
    assert preempted > 0
    assert [len(outputs) for outputs in sent.values()] == [6] * 4


def _together(engine: Any, prompts: list[np.ndarray[Any, Any]], params: dict[str, Any]) -> dict[int, list[Any]]:
    driver = Driver(engine)
    for number, prompt in enumerate(prompts):
        driver.start(number, **params)
        driver.feed(number, None, {"token_ids": prompt}, last=True)
    return driver.run()


@pytest.mark.parametrize(
    "wrong", [{"tensor_parallel_size": 2}, {"speculative_config": {"method": "ngram"}}, {"kv_transfer_config": {}}]
)
def test_arguments_that_do_not_fit_a_role_end_the_load(
    open_stage: Callable[..., Any], tiny: Path, wrong: dict[str, Any]
) -> None:
    with pytest.raises(WrongEngineArgument, match=next(iter(wrong))):
        open_stage("vllm", tiny, engine_args={**OPTIONS, **wrong}, role="decode")


@pytest.mark.parametrize("role", ["both", "prefill"])
def test_memory_for_prompts_is_an_option_of_decode_alone(open_stage: Callable[..., Any], tiny: Path, role: str) -> None:
    with pytest.raises(ValueError, match="waiting_prompts_mb: only a stage with role: decode"):
        open_stage("vllm", tiny, engine_args=OPTIONS, role=role, waiting_prompts_mb=1)
