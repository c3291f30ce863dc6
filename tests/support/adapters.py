"""LoRA adapters with random weights, made by PEFT, and the models that PEFT makes of them."""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from omni_actors.stages.adapters.files import read
from omni_actors.stages.adapters.options import Adapter

LLAMA_TARGETS = ["q_proj", "v_proj", "down_proj", "lm_head"]


def save_adapter(model: Any, directory: Path, *, seed: int = 0, **config: Any) -> Path:
    """Let PEFT save a random adapter of ``model``, which is changed and of no more use. config: of ``LoraConfig``."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(seed)
    settings = {"r": 4, "lora_alpha": 16, "target_modules": LLAMA_TARGETS, "init_lora_weights": False, **config}
    with warnings.catch_warnings():  # PEFT uses names that transformers has deprecated
        warnings.simplefilter("ignore")
        get_peft_model(model, LoraConfig(**settings)).save_pretrained(directory, save_embedding_layers=False)
    return directory


def write_adapter(
    directory: Path, checkpoint: Path, targets: Sequence[str], *, part: str = "", rank: int = 4, seed: int = 0
) -> Path:
    """Write a random adapter without PEFT. targets: endings of the names of the checkpoint's linear layers.

    part: the beginning of these names.
    """
    torch.manual_seed(seed)
    tensors = {}
    with safe_open(checkpoint / "model.safetensors", "pt") as file:
        for name in file.keys():  # noqa: SIM118 - the file is no mapping
            module = name.removesuffix(".weight")
            if name.startswith(part) and module.endswith(tuple(targets)):
                outputs, inputs = file.get_slice(name).get_shape()
                tensors[f"base_model.model.{module}.lora_A.weight"] = torch.randn(rank, inputs) / inputs**0.5
                tensors[f"base_model.model.{module}.lora_B.weight"] = torch.randn(outputs, rank) * 0.15
    assert tensors
    directory.mkdir()
    save_file(tensors, directory / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": [*targets]}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory


def with_adapter(model: Any, directory: Path) -> Any:
    """Return the model that PEFT makes of ``model`` and an adapter. It changes ``model``."""
    from peft import PeftModel

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return PeftModel.from_pretrained(model, directory).eval()


def adapter(directory: Path, name: str = "one") -> Adapter:
    """Return what a request carries that uses the adapter of this directory."""
    return Adapter(name, str(directory), read(str(directory)).digest)
