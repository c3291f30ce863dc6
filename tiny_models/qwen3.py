"""Tiny Qwen3-Omni checkpoints with random weights from a seed, in the layout of the real ones.

Text comes from a tokenizer of bytes (``tiny_models.tokenizer``), so every answer of the thinker is valid text.
As a random model never stops talking, ``text_eos`` and ``codec_eos`` scale the rows of the end in the two heads: with
the defaults some answers end by themselves and some at their limit; with 0 none does.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3OmniMoeConfig, Qwen3OmniMoeForConditionalGeneration

from tiny_models import tokenizer

CODEBOOK, GROUPS = 64, 4
"""Codes of a group, and groups of a frame (the real ones: 2048, 16)."""
SPECIALS = 1024
"""Special tokens of the talker's vocabulary, after the codes: pad, bos, eos, …, speakers."""
SPEAKERS = ("chelsie", "ethan", "aiden")
ROPE = {"rope_type": "default", "rope_theta": 1e6}
MROPE = {**ROPE, "mrope_section": [4, 2, 2], "mrope_interleaved": True}
TOKENIZER = tokenizer.build(tokenizer.QWEN3, "<tts_pad>", "<tts_text_bos>", "<tts_text_eod>")
PREPROCESSOR = {
    "processor_class": "Qwen3OmniMoeProcessor",
    "feature_extractor_type": "WhisperFeatureExtractor",
    "feature_size": 128,
    "sampling_rate": 16_000,
    "hop_length": 160,
    "n_fft": 400,
    "chunk_length": 300,
    "n_samples": 4_800_000,
    "nb_max_frames": 30_000,
    "dither": 0.0,
    "padding_side": "right",
    "padding_value": 0.0,
    "return_attention_mask": True,
    "image_processor_type": "Qwen2VLImageProcessor",
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "min_pixels": 32 * 32,
    "max_pixels": 128 * 128,
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
}
"""The one file that configures the features of audio, images and videos: the real one, with fewer pixels."""

AUDIO = {
    "num_mel_bins": 128,
    "encoder_layers": 2,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "d_model": 32,
    "downsample_hidden_size": 8,
    "initializer_range": 0.3,
    "n_window": 50,
    "n_window_infer": 400,
    "conv_chunksize": 500,
}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 4,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "num_position_embeddings": 64,
    "initializer_range": 0.3,
}
CODE2WAV = {
    "codebook_size": CODEBOOK,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_hidden_layers": 2,
    "sliding_window": 8,
    "decoder_dim": 64,
    "layer_scale_initial_scale": 0.3,
    "initializer_range": 0.2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}


def token(text: str) -> int:
    (id_,) = TOKENIZER(text).input_ids
    return id_  # type: ignore[no-any-return]


def text_config(vocabulary: int, layers: int, **more: Any) -> dict[str, Any]:
    return {
        "vocab_size": vocabulary,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 4096,
        "initializer_range": 0.3,
        "rope_parameters": MROPE,
        **more,
    }


def config(
    *,
    hidden: int = 64,
    talker_hidden: int = 64,
    layers: int = 4,
    talker_layers: int = 2,
    experts: int = 8,
    experts_per_token: int = 2,
    deepstack: Sequence[int] = (0, 1),
    speakers: Sequence[str] = SPEAKERS,
    groups: int = GROUPS,
    **code2wav: Any,
) -> Qwen3OmniMoeConfig:
    """deepstack: the vision layers whose rows are added behind the thinker's first ones. code2wav: of its part."""
    moe = {"moe_intermediate_size": 32, "num_experts": experts, "num_experts_per_tok": experts_per_token}
    talker = {
        **_talker(moe, talker_hidden, talker_layers, groups),
        "thinker_hidden_size": hidden,
        "speaker_id": {name: CODEBOOK + 8 + number for number, name in enumerate(speakers)},
    }
    return Qwen3OmniMoeConfig(
        thinker_config=_thinker(moe, hidden, layers, deepstack),
        talker_config=talker,
        code2wav_config=CODE2WAV | {"num_quantizers": groups} | code2wav,
        im_start_token_id=token(tokenizer.IM_START),
        im_end_token_id=token(tokenizer.IM_END),
        tts_pad_token_id=token("<tts_pad>"),
        tts_bos_token_id=token("<tts_text_bos>"),
        tts_eos_token_id=token("<tts_text_eod>"),
        system_token_id=token("system"),
        user_token_id=token("user"),
        assistant_token_id=token("assistant"),
        initializer_range=0.3,
    )


def _marks() -> dict[str, int]:
    """The tokens of media, which both language models know."""
    marks = tokenizer.QWEN3
    return {
        "audio_token_id": token(marks.audio),
        "image_token_id": token(marks.image),
        "video_token_id": token(marks.video),
        "audio_start_token_id": token(marks.audio_bos),
        "vision_start_token_id": token(marks.vision_bos),
        "position_id_per_seconds": 13,
    }


def _thinker(moe: dict[str, int], hidden: int, layers: int, deepstack: Sequence[int]) -> dict[str, Any]:
    return {
        **_marks(),
        "initializer_range": 0.3,
        "audio_end_token_id": token(tokenizer.QWEN3.audio_eos),
        "vision_end_token_id": token(tokenizer.QWEN3.vision_eos),
        "user_token_id": token("user"),
        "audio_config": AUDIO | {"output_dim": hidden},
        "vision_config": {
            **VISION,
            "depth": max(deepstack, default=0) + 1,
            "out_hidden_size": hidden,
            "deepstack_visual_indexes": list(deepstack),
        },
        "text_config": text_config(
            len(TOKENIZER),
            layers,
            **moe,
            hidden_size=hidden,
            eos_token_id=token(tokenizer.IM_END),
            pad_token_id=token(tokenizer.PAD),
        ),
    }


def _talker(moe: dict[str, int], hidden: int, layers: int, groups: int) -> dict[str, Any]:
    return {
        **_marks(),
        "initializer_range": 0.3,
        "text_config": text_config(
            CODEBOOK + SPECIALS, layers, **moe, hidden_size=hidden, shared_expert_intermediate_size=32
        ),
        "code_predictor_config": text_config(
            CODEBOOK,
            2,
            hidden_size=hidden,
            num_code_groups=groups,
            max_position_embeddings=64,
            rope_parameters=ROPE,
        ),
        "num_code_groups": groups,
        "accept_hidden_layer": 2,
        "spatial_merge_size": 2,
        "codec_pad_id": CODEBOOK,
        "codec_bos_id": CODEBOOK + 1,
        "codec_eos_token_id": CODEBOOK + 2,
        "codec_nothink_id": CODEBOOK + 3,
        "codec_think_bos_id": CODEBOOK + 4,
        "codec_think_eos_id": CODEBOOK + 5,
    }


def build(
    seed: int = 25, *, text_eos: float = 2.0, codec_eos: float = 1.6, **options: Any
) -> Qwen3OmniMoeForConditionalGeneration:
    """The whole model, in evaluation mode. options: see ``config``."""
    torch.manual_seed(seed)
    model: Any = Qwen3OmniMoeForConditionalGeneration(config(**options))
    model.eval()
    with torch.no_grad():
        for name, parameter in model.code2wav.named_parameters():
            if parameter.dim() >= 2 and "conv" in name:  # else the signal explodes or vanishes
                torch.nn.init.kaiming_normal_(parameter, a=1.0)
        model.code2wav.decoder[-1].conv.weight.mul_(0.012)
        for name, parameter in model.talker.named_parameters():
            if ".experts." in name:  # transformers leaves these uninitialised
                torch.nn.init.normal_(parameter, std=0.3)
        for name, parameter in model.talker.named_parameters():
            if name.endswith(".mlp.gate.weight"):  # with its zeros all experts tie, and each device picks others
                torch.nn.init.normal_(parameter, std=0.3)
    scale_ends(model, text_eos, codec_eos)
    return model  # type: ignore[no-any-return]


@torch.no_grad()
def scale_ends(model: Any, text_eos: float, codec_eos: float) -> None:
    """Name the end of an answer, and scale its rows in the two heads; with 0 it is never the most likely."""
    model.thinker.lm_head.weight[token(tokenizer.IM_END)] *= text_eos
    model.talker.codec_head.weight[CODEBOOK + 2] *= codec_eos
    model.generation_config.eos_token_id = token(tokenizer.IM_END)
    model.generation_config.pad_token_id = token(tokenizer.PAD)


def save(directory: Path, seed: int = 25, **options: Any) -> Path:
    """The same as a checkpoint directory, with all that a processor is loaded from. options: see ``build``."""
    build(seed, **options).save_pretrained(directory)
    save_processor(directory)
    return directory


def save_processor(directory: Path) -> None:
    """Save what belongs to a checkpoint beside its weights."""
    tokenizer.save(TOKENIZER, directory)
    (directory / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR))
