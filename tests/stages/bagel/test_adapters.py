"""LoRA adapters of BAGEL: a request with one is computed as by a model whose weights have the update."""

from __future__ import annotations

import json
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from omni_actors.stages.bagel.context import ContextEngine
from omni_actors.stages.bagel.denoiser import DenoiserEngine
from omni_actors.stages.bagel.one_stage import OneStageEngine
from tests.stages.bagel import cases
from tests.stages.bagel.driving import Bagel, chunks_of, context, params_of
from tests.support.adapters import adapter
from tests.support.engine_driver import Driver
from tiny_models import bagel as tiny

pytestmark = [pytest.mark.voice, pytest.mark.slow]  # it needs the libraries of the extras; the weights are random

LAYER = "language_model.model.layers.1."
UPDATED = (f"{LAYER}self_attn.q_proj", f"{LAYER}self_attn.v_proj_moe_gen", f"{LAYER}mlp_moe_gen.down_proj", "llm2vae")
RANK, SCALE = 4, 2.0


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """A checkpoint, an adapter, and the checkpoint with the adapter's update."""
    whole, updated = (tiny.save(tmp_path_factory.mktemp(name)) for name in ("whole", "updated"))
    lora = tmp_path_factory.mktemp("lora")
    tensors, torch_random = load_file(updated / "ema.safetensors"), torch.Generator().manual_seed(0)
    pairs = {}
    for name in UPDATED:
        outputs, inputs = tensors[f"{name}.weight"].shape
        down = torch.randn(RANK, inputs, generator=torch_random) / inputs**0.5
        up = torch.randn(outputs, RANK, generator=torch_random) * 0.15
        pairs |= {f"base_model.model.{name}.lora_A.weight": down, f"base_model.model.{name}.lora_B.weight": up}
        tensors[f"{name}.weight"] += SCALE * up @ down
    save_file(tensors, updated / "ema.safetensors")
    save_file(pairs, lora / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK * SCALE, "target_modules": list(UPDATED)}
    (lora / "adapter_config.json").write_text(json.dumps(config))
    return whole, lora, updated


def test_two_stages_draw_with_the_adapter_of_each_request(directories: tuple[Path, Path, Path]) -> None:
    whole, lora, updated = directories
    case = cases.PICTURES["edit"]
    with ExitStack() as stack:

        def engines(directory: Path) -> Bagel:
            made = ContextEngine(context(directory, "context")), DenoiserEngine(context(directory, "denoiser"))
            return Bagel(*(stack.enter_context(closing(each)) for each in made))

        bagel, merged = engines(whole), engines(updated)
        expected = [each.draw(case["terms"], **params_of(case))[1][-1].tensors["latents"] for each in (bagel, merged)]
        assert np.abs(expected[0] - expected[1]).max() > 1e-2
        Bagel.OF_DENOISER = (*Bagel.OF_DENOISER, "lora")
        try:
            bagel.start(1, case["terms"], **params_of(case))
            bagel.start(2, case["terms"], **params_of(case), lora=adapter(lora))
            events = bagel.run()
        finally:
            Bagel.OF_DENOISER = Bagel.OF_DENOISER[:-1]
        for number, latents in ((1, expected[0]), (2, expected[1])):
            np.testing.assert_allclose(events[number][-2].tensors["latents"], latents, rtol=0, atol=1e-4)
        for engine in (bagel.reader.engine, bagel.painter.engine):
            assert not engine._adapters.loaded  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["edit", "thought"])
def test_one_stage_keeps_the_adapter_until_the_picture_is_drawn(
    directories: tuple[Path, Path, Path], name: str
) -> None:
    whole, lora, updated = directories
    case = cases.PICTURES[name]

    def drawn(directory: Path, **more: Any) -> Any:
        with closing(OneStageEngine(context(directory, "bagel"))) as engine:
            driver = Driver(engine)
            driver.start(1, **params_of(case), **more)
            chunks = chunks_of(case["terms"])
            for i, chunk in enumerate(chunks):
                driver.feed(1, *chunk, last=i == len(chunks) - 1)
            driver.run()
            assert not engine._adapters.loaded
            return driver.checkpoints[1].tensors["latents"]

    np.testing.assert_allclose(drawn(whole, lora=adapter(lora)), drawn(updated), rtol=0, atol=1e-4)
