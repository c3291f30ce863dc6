"""New weights for the denoiser of a running system, with real workers and a tiny checkpoint in diffusers' layout."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from omni_actors import OmniSystem
from omni_actors.config import load
from omni_actors.errors import InvalidRequest

pytestmark = [pytest.mark.voice, pytest.mark.slow]  # four workers that import torch
Pixels = np.ndarray[Any, np.dtype[np.uint8]]


@asynccontextmanager
async def opened(directory: Path) -> AsyncIterator[OmniSystem]:
    pipeline = load("qwen_image")
    changes: dict[str, Any] = {"model": str(directory), "device": "cpu", "threads": 1, "options": {}}
    stages = {name: msgspec.structs.replace(stage, **changes) for name, stage in pipeline.stages.items()}
    async with OmniSystem.open(msgspec.structs.replace(pipeline, stages=stages)) as omni:
        yield omni


async def picture(omni: OmniSystem) -> Pixels:
    drawn = await omni.generate("a fox", modalities=("image",), size="32x32", steps=3, seed=1).picture()
    return drawn.pixels


async def test_refused_weights_leave_the_model_and_others_replace_it(tmp_path: Path) -> None:
    from tiny_models import qwen_image as tiny

    model, other = (tiny.save(tmp_path / name, seed) for seed, name in enumerate(("model", "other")))
    tensors = load_file(other / "transformer" / "diffusion_pytorch_model.safetensors")
    save_file({**tensors, "img_in.bias": tensors["img_in.bias"][:-1].clone()}, tmp_path / "wrong.safetensors")
    async with opened(model) as omni:
        before = await picture(omni)
        (refused,) = (await omni.update_weights(tmp_path / "wrong.safetensors", stages=["denoiser"]))["denoiser"]
        assert isinstance(refused.error, InvalidRequest)
        np.testing.assert_array_equal(await picture(omni), before)
        (done,) = (await omni.update_weights(other / "transformer", stages=["denoiser"]))["denoiser"]
        assert done.value == {"updated": len(tensors), "complete": True}
        assert (await picture(omni) != before).any()
