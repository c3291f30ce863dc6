"""Checkpoints of the omni models with random weights: tiny ones, or with layers of the real size.

The layers have the authors' sizes (``REAL``), and there are as many of the language models' as a budget allows. The
vocabularies stay those of the tiny tokenizer, and the encoders of sound and pictures stay tiny: the requests are text.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import Qwen2_5OmniForConditionalGeneration, Qwen3OmniMoeForConditionalGeneration

from tiny_models import qwen2_5, qwen3

ITEM_BYTES = 2
"""The size of a bfloat16 number."""
LEAST_LAYERS = 4
"""The talker takes hidden rows from within the thinker, so it needs some."""


class Family(NamedTuple):
    """An omni model.

    pipeline: the shipped one. tiny: the module that makes the tiny model. real: what the real configuration changes in
    the tiny one. decoder: the stage that makes the sound. frame_s: how long a frame of codes sounds, in seconds.
    """

    pipeline: str
    model: Any
    tiny: Any
    thinker_layers: int
    talker_layers: int
    real: Mapping[str, Any]
    decoder: str
    frame_s: float


FAMILIES = {
    "qwen3": Family(
        pipeline="qwen3_omni",
        model=Qwen3OmniMoeForConditionalGeneration,
        tiny=qwen3,
        thinker_layers=48,
        talker_layers=20,
        real={
            "thinker_config": {
                "audio_config": {"output_dim": 2048},
                "vision_config": {"out_hidden_size": 2048},
                "text_config": {
                    "hidden_size": 2048,
                    "num_attention_heads": 32,
                    "num_key_value_heads": 4,
                    "head_dim": 128,
                    "moe_intermediate_size": 768,
                    "num_experts": 128,
                    "num_experts_per_tok": 8,
                    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [24, 20, 20]},
                },
            },
            "talker_config": {
                "thinker_hidden_size": 2048,
                "num_code_groups": 16,
                "text_config": {
                    "hidden_size": 1024,
                    "num_attention_heads": 16,
                    "num_key_value_heads": 2,
                    "head_dim": 128,
                    "moe_intermediate_size": 384,
                    "shared_expert_intermediate_size": 768,
                    "num_experts": 128,
                    "num_experts_per_tok": 6,
                    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [24, 20, 20]},
                },
                "code_predictor_config": {
                    "hidden_size": 1024,
                    "intermediate_size": 3072,
                    "num_hidden_layers": 5,
                    "num_attention_heads": 16,
                    "num_key_value_heads": 8,
                    "head_dim": 128,
                    "num_code_groups": 16,
                },
            },
            "code2wav_config": {
                "hidden_size": 1024,
                "intermediate_size": 3072,
                "num_hidden_layers": 8,
                "num_attention_heads": 16,
                "num_key_value_heads": 16,
                "num_quantizers": 16,
                "decoder_dim": 1536,
                "sliding_window": 72,
            },
        },
        decoder="code2wav",
        frame_s=0.08,
    ),
    "qwen2_5": Family(
        pipeline="qwen2_5_omni",
        model=Qwen2_5OmniForConditionalGeneration,
        tiny=qwen2_5,
        thinker_layers=28,
        talker_layers=24,
        real={
            "thinker_config": {
                "audio_config": {"output_dim": 3584},
                "vision_config": {"out_hidden_size": 3584},
                "text_config": {
                    "hidden_size": 3584,
                    "intermediate_size": 18944,
                    "num_attention_heads": 28,
                    "num_key_value_heads": 4,
                    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
                },
            },
            "talker_config": {
                "embedding_size": 3584,
                "hidden_size": 896,
                "intermediate_size": 18944,
                "num_attention_heads": 12,
                "num_key_value_heads": 4,
                "head_dim": 128,
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
            },
            "token2wav_config": {
                "dit_config": {"hidden_size": 1024, "num_hidden_layers": 22, "num_attention_heads": 16, "head_dim": 64},
                "bigvgan_config": {
                    "upsample_initial_channel": 1536,
                    "resblock_kernel_sizes": [3, 7, 11],
                    "resblock_dilation_sizes": [[1, 3, 5], [1, 3, 5], [1, 3, 5]],
                },
            },
        },
        decoder="token2wav",
        frame_s=0.02,
    ),
}


class Saved(NamedTuple):
    """A checkpoint. layers: those of the thinker and the talker. weights_bytes: of all parts."""

    directory: Path
    layers: tuple[int, int]
    weights_bytes: int


def save(name: str, directory: Path, budget_bytes: int | None, device: str) -> Saved:
    """Write a checkpoint of a family.

    budget_bytes: how large the weights may be in bfloat16; None: the tiny model, in float32. device: where they are
    drawn. Raises ValueError if the fewest layers do not fit.
    """
    family = FAMILIES[name]
    if budget_bytes is None:
        family.tiny.save(directory, text_eos=0.0, codec_eos=0.0)
        config = family.tiny.config()
        return Saved(directory, _layers(config), sum(each.stat().st_size for each in directory.glob("*.safetensors")))
    layers = _affordable(family, budget_bytes)
    model = _random(family, layers, device)
    model.save_pretrained(directory, max_shard_size="4GB")
    family.tiny.save_processor(directory)
    return Saved(directory, layers, bfloat16_bytes(model))


def _affordable(family: Family, budget_bytes: int) -> tuple[int, int]:
    """Return how many layers of the thinker and the talker fit, in the real proportion."""
    few, more = (
        bfloat16_bytes(_empty(family, _proportional(family, count))) for count in (LEAST_LAYERS, 2 * LEAST_LAYERS)
    )
    per_layer = (more - few) / LEAST_LAYERS
    count = LEAST_LAYERS + math.floor((budget_bytes - few) / per_layer)
    if count < LEAST_LAYERS:
        raise ValueError(f"{LEAST_LAYERS} layers of the thinker take {few / 1e9:.1f} GB, more than the budget")
    return _proportional(family, min(count, family.thinker_layers))


def _proportional(family: Family, thinker: int) -> tuple[int, int]:
    return thinker, max(2, family.talker_layers * thinker // family.thinker_layers)


def _empty(family: Family, layers: tuple[int, int]) -> Any:
    """Return the model without memory for its weights."""
    config = family.tiny.config()
    changed = _without_layer_types(_merged(config.to_dict(), family.real))
    thinker, talker = changed["thinker_config"]["text_config"], changed["talker_config"]
    thinker["num_hidden_layers"] = layers[0]
    talker.get("text_config", talker)["num_hidden_layers"] = layers[1]
    if "accept_hidden_layer" in talker:
        talker["accept_hidden_layer"] = layers[0] // 2
    with torch.device("meta"):
        return family.model(type(config).from_dict(changed)).to(torch.bfloat16)


def _random(family: Family, layers: tuple[int, int], device: str) -> Any:
    """Return the model with weights that keep all signals finite, and that never choose the end of an answer."""
    model = with_random_weights(_empty(family, layers), device).eval()
    family.tiny.scale_ends(model, 0.0, 0.0)
    return model


def with_random_weights(model: Any, device: str) -> Any:
    """Return a model that was made on the device "meta" with weights on a device. They keep its signals finite."""
    model = model.to_empty(device=device)
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.02)
            else:
                parameter.fill_(1.0 if name.endswith("weight") else 0.0)
    return model


def bfloat16_bytes(model: Any) -> int:
    """Return the size of a model's weights in bfloat16."""
    return sum(parameter.numel() for parameter in model.parameters()) * ITEM_BYTES


def _layers(config: Any) -> tuple[int, int]:
    talker = getattr(config.talker_config, "text_config", config.talker_config)
    return config.thinker_config.text_config.num_hidden_layers, talker.num_hidden_layers


def _merged(document: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return a nested mapping with these changes."""
    merged = dict(document)
    for key, value in changes.items():
        old = merged.get(key)
        merged[key] = _merged(old, value) if isinstance(value, Mapping) and isinstance(old, Mapping) else value
    return merged


def _without_layer_types(document: Any) -> Any:
    """Drop the lists with an entry for each layer, which follow from the number of layers."""
    if isinstance(document, Mapping):
        return {key: _without_layer_types(value) for key, value in document.items() if key != "layer_types"}
    return document
