"""Tiny Qwen-Image checkpoints with random weights from a seed, in diffusers' directory layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKLQwenImage,
    FlowMatchEulerDiscreteScheduler,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
)
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

from tiny_models import tokenizer as words

TOKENIZER = words.build(words.QWEN3)
SCALE = 4
"""Pixels of a latent's side; the side of a picture is a multiple of twice that. (The real model has 8.)"""
CHANNELS = 4
"""Channels of the latents. (The real model has 16.)"""
WIDTH = 32
"""Of the prompt's rows."""
IMAGE_PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    "min_pixels": 28 * 28,
    "max_pixels": 112 * 112,
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
}
"""The real one's features, of smaller pictures."""


def text_encoder(seed: int = 0) -> Qwen2_5_VLForConditionalGeneration:
    marks = words.QWEN3
    text = {
        "hidden_size": WIDTH,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "vocab_size": len(TOKENIZER),
        "max_position_embeddings": 4096,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]},
        "initializer_range": 0.2,
        "bos_token_id": None,
        "eos_token_id": TOKENIZER.convert_tokens_to_ids(words.IM_END),
    }
    vision = {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 2,
        "window_size": 56,
        "out_hidden_size": WIDTH,
        "fullatt_block_indexes": [1],
        "initializer_range": 0.1,
    }
    names = {"image_token_id": marks.image, "video_token_id": marks.video}
    names |= {"vision_start_token_id": marks.vision_bos, "vision_end_token_id": marks.vision_eos}
    ids = {name: TOKENIZER.convert_tokens_to_ids(mark) for name, mark in names.items()}
    torch.manual_seed(seed)
    model: Any = Qwen2_5_VLForConditionalGeneration(
        Qwen2_5_VLConfig(text_config=text, vision_config=vision, initializer_range=0.2, **ids)
    )
    return model.eval()  # type: ignore[no-any-return]


def transformer(seed: int = 0, **changes: Any) -> QwenImageTransformer2DModel:
    """changes: of the configuration."""
    config = {
        "patch_size": 2,
        "in_channels": 4 * CHANNELS,
        "out_channels": CHANNELS,
        "num_layers": 2,
        "attention_head_dim": 16,
        "num_attention_heads": 3,
        "joint_attention_dim": WIDTH,
        "guidance_embeds": False,
        "axes_dims_rope": (8, 4, 4),
    }
    torch.manual_seed(seed)
    return QwenImageTransformer2DModel(**(config | changes)).eval()  # type: ignore[no-any-return]


def vae(seed: int = 0) -> AutoencoderKLQwenImage:
    torch.manual_seed(seed)
    return AutoencoderKLQwenImage(  # type: ignore[no-any-return]
        base_dim=8,
        z_dim=CHANNELS,
        dim_mult=[1, 2, 2],
        num_res_blocks=1,
        temperal_downsample=[False, True],
        latents_mean=[-0.2, 0.1, 0.3, 0.0],
        latents_std=[1.5, 0.8, 1.1, 2.0],
    ).eval()


def scheduler() -> FlowMatchEulerDiscreteScheduler:
    """The real one."""
    return FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True,
        base_shift=0.5,
        max_shift=0.9,
        base_image_seq_len=256,
        max_image_seq_len=8192,
        shift_terminal=0.02,
        time_shift_type="exponential",
    )


def save(directory: Path, seed: int = 0) -> Path:
    """A checkpoint directory of ``QwenImagePipeline``, of about a megabyte."""
    QwenImagePipeline(
        scheduler=scheduler(),
        vae=vae(seed),
        text_encoder=text_encoder(seed),
        tokenizer=TOKENIZER,
        transformer=transformer(seed),
    ).save_pretrained(directory)
    return directory


def save_edit(directory: Path, seed: int = 0, *, plus: bool = False) -> Path:
    """A checkpoint directory of ``QwenImageEditPipeline``, with what its processor is loaded from.

    plus: of ``QwenImageEditPlusPipeline``, which takes several pictures.
    """
    save(directory, seed)
    processor = directory / "processor"
    words.save(TOKENIZER, processor)
    (processor / "preprocessor_config.json").write_text(
        json.dumps({"processor_class": "Qwen2_5_VLProcessor", **IMAGE_PROCESSOR})
    )
    index = json.loads((directory / "model_index.json").read_text())
    index["_class_name"] = "QwenImageEditPlusPipeline" if plus else "QwenImageEditPipeline"
    index["processor"] = ["transformers", "Qwen2_5_VLProcessor"]
    (directory / "model_index.json").write_text(json.dumps(index, indent=2))
    return directory
