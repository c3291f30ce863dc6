"""Each stage of Qwen-Image loads its own weights only, and ``memory`` counts these."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from omni_actors.stages import memory
from tiny_models import qwen_image as tiny

pytestmark = pytest.mark.voice


@pytest.fixture(scope="module", params=["text", "edit"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp(request.param)
    return tiny.save(directory) if request.param == "text" else tiny.save_edit(directory)


@pytest.mark.parametrize("part", ["text_encoder", "vae_encoder", "denoiser", "vae_decoder"])
def test_a_stage_holds_the_weights_that_are_counted_for_it(
    part: str, checkpoint: Path, open_stage: Callable[..., Any]
) -> None:
    engine = f"qwen_image_{part}"
    with closing(open_stage(engine, checkpoint, dtype="bfloat16")) as opened:
        assert resident_bytes(opened) == memory.count(engine, checkpoint, {"dtype": "bfloat16"}).weights


def resident_bytes(engine: Any) -> int:
    """Return the bytes of all parameters of the modules that an engine reaches."""
    parts = [each for each in vars(engine).values() if hasattr(each, "__dict__")]
    modules = [each for part in (engine, *parts) for each in vars(part).values() if isinstance(each, torch.nn.Module)]
    tensors = {id(tensor): tensor for module in modules for tensor in module.parameters()}
    return sum(tensor.nbytes for tensor in tensors.values())


def test_a_text_only_model_has_no_vision_tower_and_no_output_layer(tmp_path: Path) -> None:
    whole = sum(parameter.numel() for parameter in tiny.text_encoder().parameters())
    tiny.save(tmp_path)
    counted = memory.count("qwen_image_text_encoder", tmp_path, {}).weights // 4
    tower = tiny.text_encoder().model.visual
    left_out = sum(parameter.numel() for parameter in tower.parameters()) + tiny.WIDTH * len(tiny.TOKENIZER)
    assert counted == whole - left_out
