"""Tiny pipelines of diffusers with random weights from a seed, in diffusers' directory layout: one family each."""

from __future__ import annotations

import string
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers

WIDTH = 32
"""Of the hidden states of every text encoder."""


def stable_diffusion() -> Any:
    """Stable Diffusion 1.x: a U-Net, one CLIP text encoder, no safety checker."""
    return diffusers.StableDiffusionPipeline(
        unet=_unet(cross_attention_dim=WIDTH),
        scheduler=diffusers.DDIMScheduler(clip_sample=False, set_alpha_to_one=False, steps_offset=1),
        vae=_vae(),
        text_encoder=_clip(),
        tokenizer=_clip_tokenizer(),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


def stable_diffusion_xl() -> Any:
    """Stable Diffusion XL: a U-Net that also knows sizes, two CLIP text encoders."""
    unet = _unet(
        cross_attention_dim=2 * WIDTH,
        addition_embed_type="text_time",
        addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=6 * 8 + WIDTH,
    )
    return diffusers.StableDiffusionXLPipeline(
        unet=unet,
        scheduler=diffusers.EulerAncestralDiscreteScheduler(),
        vae=_vae(),
        text_encoder=_clip(),
        text_encoder_2=_clip(projected=True),
        tokenizer=_clip_tokenizer(),
        tokenizer_2=_clip_tokenizer(),
    )


def stable_diffusion_3() -> Any:
    """Stable Diffusion 3: a transformer with flow matching, two CLIP text encoders and T5."""
    transformer = diffusers.SD3Transformer2DModel(
        sample_size=32,
        patch_size=1,
        in_channels=4,
        num_layers=1,
        attention_head_dim=8,
        num_attention_heads=4,
        caption_projection_dim=WIDTH,
        joint_attention_dim=WIDTH,
        pooled_projection_dim=2 * WIDTH,
        out_channels=4,
    )
    return diffusers.StableDiffusion3Pipeline(
        transformer=transformer,
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
        vae=_vae(shift_factor=0.06),
        text_encoder=_clip(projected=True),
        text_encoder_2=_clip(projected=True),
        text_encoder_3=_t5(),
        tokenizer=_clip_tokenizer(),
        tokenizer_2=_clip_tokenizer(),
        tokenizer_3=_t5_tokenizer(),
    )


def flux() -> Any:
    """FLUX.1: packed latents, guidance as an input of the transformer, CLIP and T5."""
    transformer = diffusers.FluxTransformer2DModel(
        patch_size=1,
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=WIDTH,
        pooled_projection_dim=WIDTH,
        axes_dims_rope=(4, 4, 8),
        guidance_embeds=True,
    )
    return diffusers.FluxPipeline(
        transformer=transformer,
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
        vae=_vae(shift_factor=0.06),
        text_encoder=_clip(),
        text_encoder_2=_t5(),
        tokenizer=_clip_tokenizer(),
        tokenizer_2=_t5_tokenizer(),
    )


def wan() -> Any:
    """Wan: text to video, with UMT5 and a causal video VAE."""
    transformer = diffusers.WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=16,
        out_channels=16,
        text_dim=WIDTH,
        freq_dim=16,
        ffn_dim=32,
        num_layers=1,
        rope_max_seq_len=32,
    )
    vae = diffusers.AutoencoderKLWan(
        base_dim=3, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1, temperal_downsample=[False, True, True]
    )
    return diffusers.WanPipeline(
        transformer=transformer,
        scheduler=diffusers.UniPCMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
        ),
        vae=vae,
        text_encoder=_t5(transformers.UMT5EncoderModel, transformers.UMT5Config),
        tokenizer=_t5_tokenizer(),
    )


def pixart() -> Any:
    """PixArt-Σ: a transformer with T5, and a callback of the older form."""
    transformer = diffusers.PixArtTransformer2DModel(
        sample_size=8,
        num_layers=1,
        patch_size=2,
        attention_head_dim=8,
        num_attention_heads=4,
        caption_channels=WIDTH,
        in_channels=4,
        cross_attention_dim=WIDTH,
        out_channels=8,
        attention_bias=True,
        num_embeds_ada_norm=1000,
        norm_elementwise_affine=False,
        norm_eps=1e-6,
        use_additional_conditions=False,
    )
    return diffusers.PixArtSigmaPipeline(
        transformer=transformer,
        scheduler=diffusers.DPMSolverMultistepScheduler(),
        vae=_vae(),
        text_encoder=_t5(),
        tokenizer=_t5_tokenizer(),
    )


FAMILIES: dict[str, Callable[[], Any]] = {
    make.__name__: make for make in (stable_diffusion, stable_diffusion_xl, stable_diffusion_3, flux, wan, pixart)
}


def save(directory: Path, family: str = "stable_diffusion", seed: int = 0) -> Path:
    """Save the pipeline of a family, one to three megabytes, and return the directory."""
    torch.manual_seed(seed)
    FAMILIES[family]().save_pretrained(directory)
    return directory


def _unet(**more: Any) -> Any:
    return diffusers.UNet2DConditionModel(
        block_out_channels=(8, 16),
        layers_per_block=1,
        sample_size=8,
        in_channels=4,
        out_channels=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=(2, 4),
        norm_num_groups=4,
        use_linear_projection=True,
        **more,
    )


def _vae(**more: Any) -> Any:
    """One pixel of the latents is 2 × 2 of the picture. (In the real models it is 8 × 8.)"""
    return diffusers.AutoencoderKL(
        block_out_channels=(8, 16),
        in_channels=3,
        out_channels=3,
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=4,
        norm_num_groups=4,
        **more,
    )


def _clip(*, projected: bool = False) -> Any:
    config = transformers.CLIPTextConfig(
        hidden_size=WIDTH,
        intermediate_size=37,
        num_attention_heads=4,
        num_hidden_layers=2,
        projection_dim=WIDTH,
        vocab_size=len(_clip_tokenizer()),
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
    )
    return (transformers.CLIPTextModelWithProjection if projected else transformers.CLIPTextModel)(config).eval()


def _t5(model: Any = transformers.T5EncoderModel, config: Any = transformers.T5Config) -> Any:
    sizes = {"d_model": WIDTH, "d_kv": 8, "d_ff": 37, "num_heads": 4, "num_layers": 1}
    return model(config(vocab_size=len(_t5_tokenizer()), **sizes)).eval()


def _clip_tokenizer() -> Any:
    """Letters are tokens."""
    symbols = string.ascii_lowercase + string.digits + string.punctuation
    tokens = ["<|startoftext|>", "<|endoftext|>", *symbols, *(f"{symbol}</w>" for symbol in symbols)]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    return transformers.CLIPTokenizer(vocab=vocabulary, merges=[], model_max_length=77)


def _t5_tokenizer() -> Any:
    """Letters are tokens."""
    pieces = ["<pad>", "</s>", "<unk>", "▁", *string.ascii_letters, *string.digits, *string.punctuation]
    return transformers.T5Tokenizer(vocab=[(piece, -1.0) for piece in pieces], extra_ids=0, model_max_length=77)
