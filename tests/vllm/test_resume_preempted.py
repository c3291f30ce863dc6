"""Requests that go on from their journals on vLLM while its cache is too small for all, or has their beginnings."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest

from tests.support.engine_driver import Driver
from tests.vllm.test_resume import OWN, QUESTION, described, like


@pytest.mark.parametrize("caching", [True, False])
def test_resumed_requests_are_preempted_and_find_prefixes(open_stage: Callable[..., Any], caching: bool) -> None:
    """The cache has room for two of six requests. Later ones may find what earlier ones have left in it."""
    args = {"block_size": 32, "max_model_len": 256, "num_gpu_blocks_override": 9, "enable_prefix_caching": caching}
    params = {**OWN, "max_tokens": 60, "ignore_eos": True}
    with closing(open_stage("vllm", engine_args=args)) as engine:
        driver, whole = Driver(engine), []
        for number in range(6):
            driver.start(number, seed=number, **params)
            driver.feed(number, QUESTION, last=True)
            whole.append(driver.run()[number])
        before = engine.gauges()
        for number, outputs in enumerate(whole):
            journal = tuple(output.decisions for output in outputs[: 5 + 9 * number])
            driver.start(number, seed=number, journal=journal, **params)
            driver.feed(number, QUESTION, last=True)
        for number, outputs in driver.run().items():
            assert described(outputs) == like(whole[number])
        after = engine.gauges()
        assert after["num_preemptions"] > before["num_preemptions"]
        assert (after["prefix_cache_hits"] > before["prefix_cache_hits"]) == caching
        decoded_again = sum(5 + 9 * number for number in range(6))
        assert after["generation_tokens"] - before["generation_tokens"] < 6 * 60 - decoded_again / 2
