"""Sixteen requests of several lengths, concurrent against sequential, on the tiny checkpoint of the tests."""

from __future__ import annotations

import statistics
import time
from pathlib import Path

import msgspec
import trio

from bench.omni.pipelines import Scenario, compute
from omni_actors import OmniSystem
from tiny_models import qwen3 as tiny

REQUESTS = 16


class Batching(msgspec.Struct):
    """Medians in seconds."""

    sequence_s: float
    concurrent_s: float

    @property
    def speedup(self) -> float:
        return self.sequence_s / self.concurrent_s


async def measure(directory: Path, rounds: int) -> Batching:
    """Measure both. directory: where to make the checkpoint."""
    scenario: Scenario = compute(tiny.save(directory, text_eos=0.0, codec_eos=0.0))
    async with OmniSystem.open(scenario.pipeline(streamed=True)) as omni:
        await omni.wait_ready()

        async def one(number: int) -> None:
            prompt = "please tell me a story " + "about the sea " * (number % 5)
            params = {"max_tokens": 20 + number, "talker_max_tokens": 41 + 4 * number, "talker_temperature": 0.0}
            async for _ in omni.generate(prompt, modalities=("text", "audio"), **params):
                pass

        sequence, concurrent = [], []
        for turn in range(rounds + 1):
            began = time.monotonic()
            for number in range(REQUESTS):
                await one(number)
            between = time.monotonic()
            async with trio.open_nursery() as nursery:
                for number in range(REQUESTS):
                    nursery.start_soon(one, number)
            if turn:  # the first round warms up
                sequence.append(between - began)
                concurrent.append(time.monotonic() - between)
    return Batching(statistics.median(sequence), statistics.median(concurrent))
