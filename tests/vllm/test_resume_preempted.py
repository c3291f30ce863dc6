"""Requests that go on from their journals on vLLM while its cache is too small for all, or has their beginnings."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest

from omni_actors.stages.base import StageOutput
from tests.support.engine_driver import Driver
from tests.vllm.test_resume import OWN, QUESTION, described, like

TOKENS = 60


@pytest.mark.timeout(300)  # a minute on two busy cores
@pytest.mark.parametrize("caching", [True, False])
def test_resumed_requests_are_preempted_and_find_prefixes(open_stage: Callable[..., Any], caching: bool) -> None:
    """The cache has room for two of six requests. With prefix caching, a request may find even its answer in it."""
    args = {"block_size": 32, "max_model_len": 256, "num_gpu_blocks_override": 9, "enable_prefix_caching": caching}
    with closing(open_stage("vllm", engine_args=args)) as engine:
        driver, whole = Driver(engine), []
        for number in range(6):
            whole.append(answers(driver, [(number, [])])[number])
            hits, journal = engine.gauges()["prefix_cache_hits"], whole[-1][:50]
            assert described(answers(driver, [(number, journal)])[number]) == like(whole[-1])
            found = engine.gauges()["prefix_cache_hits"] - hits
            assert (found > whole[-1][-1].data["prompt_tokens"]) == caching
        before = engine.gauges()
        for number, outputs in answers(driver, [(n, outputs[: 5 + 9 * n]) for n, outputs in enumerate(whole)]).items():
            assert described(outputs) == like(whole[number])
        after = engine.gauges()
        assert after["num_preemptions"] > before["num_preemptions"]
        decided = sum(5 + 9 * number for number in range(6))
        assert after["generation_tokens"] - before["generation_tokens"] == 6 * TOKENS - decided


def answers(driver: Driver, asked: list[tuple[int, list[StageOutput]]]) -> dict[int, list[StageOutput]]:
    """Answer the question for each seed, behind these outputs."""
    for seed, outputs in asked:
        journal = tuple(output.decisions for output in outputs)
        driver.start(seed, seed=seed, journal=journal, **{**OWN, "max_tokens": TOKENS, "ignore_eos": True})
        driver.feed(seed, QUESTION, last=True)
    return driver.run()
