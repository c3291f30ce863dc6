"""Pictures on a device: a Qwen-Image with random weights, whose transformer has layers of the real size.

Its text encoder and VAE are tiny. The VAE's pixels are larger than the real one's, so that ``SIZE`` has as many tokens
as 1024x1024 has in the real model.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import trio

from bench.gpu.checkpoints import bfloat16_bytes, with_random_weights
from omni_actors import OmniSystem, config
from omni_actors.config import Pipeline
from tiny_models import qwen_image as tiny

Row = dict[str, Any]
REAL: Row = {"num_attention_heads": 24, "attention_head_dim": 128, "axes_dims_rope": (16, 56, 56)}
REAL_LAYERS = 60
SIZE, STEPS = "512x512", 8
TINY_SIZE = "32x32"
PROMPT, NEGATIVE = "a cat by the sea", "a dog"


def save(directory: Path, budget_bytes: int | None, device: str) -> int:
    """Write a checkpoint and return the number of layers of its transformer.

    budget_bytes: how large the transformer may be in bfloat16; None: the tiny one, in float32. device: where its
    weights are drawn.
    """
    tiny.save(directory)
    if budget_bytes is None:
        return int(tiny.transformer().config.num_layers)
    with torch.device("meta"):
        one, two = (bfloat16_bytes(tiny.transformer(**REAL, num_layers=count)) for count in (1, 2))
    layers = max(1, min(REAL_LAYERS, math.floor(1 + (budget_bytes - one) / (two - one))))
    with torch.device("meta"):
        model = tiny.transformer(**REAL, num_layers=layers).to(torch.bfloat16)
    with_random_weights(model, device).save_pretrained(directory / "transformer", max_shard_size="4GB")
    return layers


def pipeline(directory: Path, device: str, most: int) -> Pipeline:
    """Return the shipped pipeline on one device. most: requests at a time, each of which has a negative prompt."""
    dtype = "bfloat16" if device.startswith("cuda") else "float32"
    changes: Row = {"limits.max_requests": most, "stages.denoiser.options.max_batch": 2 * most}
    for stage in ("text_encoder", "image_encoder", "denoiser", "vae"):
        changes |= {f"stages.{stage}.model": str(directory), f"stages.{stage}.options.dtype": dtype}
        changes |= {f"stages.{stage}.device": device, f"stages.{stage}.threads": 1}
    return config.load("qwen_image", changes)


async def serving(directory: Path, device: str, loads: Iterable[int], *, is_tiny: bool) -> list[Row]:
    """Return a row for each load: so many pictures at once."""
    size, counts, rows = TINY_SIZE if is_tiny else SIZE, sorted(loads), list[Row]()
    async with OmniSystem.open(pipeline(directory, device, counts[-1])) as omni:
        await _draw(omni, size)  # what a first request waits for is not measured
        for count in counts:
            began, times_s = time.monotonic(), list[float]()

            async def draw(times_s: list[float] = times_s) -> None:
                times_s.append(await _draw(omni, size))

            async with trio.open_nursery() as nursery:
                for _ in range(count):
                    nursery.start_soon(draw)
            steps_per_s = count * STEPS / (time.monotonic() - began)
            rows.append({"at once": count, "steps/s": steps_per_s, "picture_s": statistics.median(times_s)})
    return rows


async def _draw(omni: OmniSystem, size: str) -> float:
    """Return the seconds that a picture takes."""
    began = time.monotonic()
    await omni.generate(
        PROMPT, modalities=("image",), size=size, steps=STEPS, guidance=4.0, negative_prompt=NEGATIVE, seed=1
    ).picture()
    return time.monotonic() - began
