"""Tiny BAGEL checkpoints with random weights from a seed, in the layout of the real one."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from omni_actors.stages.bagel.config import read
from omni_actors.stages.bagel.model import BagelModel
from tiny_models import tokenizer as words

TOKENIZER = words.build(words.QWEN3)
LANGUAGE = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "hidden_act": "silu",
    "vocab_size": len(TOKENIZER),
}
VISION = {
    "model_type": "siglip_vision_model",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "patch_size": 14,
    "image_size": 112,
    "num_channels": 3,
    "layer_norm_eps": 1e-6,
    "hidden_act": "gelu_pytorch_tanh",
}
WHOLE = {
    "architectures": ["BagelForConditionalGeneration"],
    "model_type": "bagel",
    "vae_config": {"z_channels": 4, "downsample": 4, "ch": 32, "ch_mult": [1, 1, 2], "num_res_blocks": 1},
    "latent_patch_size": 2,
    "max_latent_size": 16,
    "vit_max_num_patch_per_side": 8,
    "vae_image_size": [32, 128],
    "vit_image_size": [28, 112],
    "connector_act": "gelu_pytorch_tanh",
}
"""The two sizes of pictures are this project's: the real checkpoint leaves them to the code."""


def save(directory: Path, seed: int = 0, **language: Any) -> Path:
    """Write a checkpoint and return its directory. language: changes of the language model's configuration."""
    directory.mkdir(parents=True, exist_ok=True)
    configs = {"config": WHOLE, "llm_config": {**LANGUAGE, **language}, "vit_config": VISION}
    for name, config in configs.items():
        (directory / f"{name}.json").write_text(json.dumps(config, indent=1))
    words.save(TOKENIZER, directory)
    with torch.device("meta"):
        model = BagelModel(read(directory), reads=True, draws=True)
    tensors = {name: _drawn(name, tuple(each.shape), seed) for name, each in model.state_dict().items()}
    parts = ("encoder.", "decoder.")
    save_file({name: each for name, each in tensors.items() if name.startswith(parts)}, directory / "ae.safetensors")
    rest = {name: each for name, each in tensors.items() if not name.startswith(parts)}
    save_file(rest, directory / "ema.safetensors")
    return directory


def _drawn(name: str, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Return a tensor that depends on its name, its shape and the seed alone. numpy keeps these streams stable."""
    draw = np.random.default_rng([seed, zlib.crc32(name.encode())]).standard_normal(shape).astype(np.float32)
    if "norm" in name:
        return torch.from_numpy(0.1 * draw + (0.0 if name.endswith("bias") else 1.0))
    if name.endswith("bias"):
        return torch.from_numpy(0.1 * draw)
    if "embed" in name and "patch" not in name and "time" not in name:
        return torch.from_numpy(0.5 * draw)
    return torch.from_numpy(draw / np.sqrt(np.prod(shape[1:])).astype(np.float32))
