"""Tiny Qwen3-Omni checkpoints with random weights from a seed, in the layout of the real ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3OmniMoeConfig, Qwen3OmniMoeForConditionalGeneration

TEXT_VOCABULARY = 512
IM_START, IM_END, PAD, SYSTEM, USER, ASSISTANT = range(496, 502)
AUDIO, AUDIO_START, AUDIO_END, IMAGE, VIDEO, VISION_START, VISION_END = range(502, 509)
TTS_PAD, TTS_BOS, TTS_EOS = range(509, TEXT_VOCABULARY)
CODEBOOK, GROUPS = 64, 4
"""Codes of a group, and groups of a frame (the real ones: 2048, 16)."""
SPECIALS = 1024
"""Of the talker's vocabulary, behind the codes: pad, bos, eos, …, speakers."""
ROPE = {"rope_type": "default", "rope_theta": 1e6}
MROPE = {**ROPE, "mrope_section": [4, 2, 2], "mrope_interleaved": True}


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


def config(**code2wav: Any) -> Qwen3OmniMoeConfig:
    """code2wav: changes of its part."""
    moe = {"moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2}
    ids = {
        "audio_token_id": AUDIO,
        "image_token_id": IMAGE,
        "video_token_id": VIDEO,
        "audio_start_token_id": AUDIO_START,
        "vision_start_token_id": VISION_START,
        "position_id_per_seconds": 13,
    }
    thinker = {
        **ids,
        "audio_end_token_id": AUDIO_END,
        "vision_end_token_id": VISION_END,
        "user_token_id": USER,
        "audio_config": {
            "num_mel_bins": 128,
            "encoder_layers": 2,
            "encoder_attention_heads": 4,
            "encoder_ffn_dim": 64,
            "d_model": 32,
            "output_dim": 64,
            "downsample_hidden_size": 8,
        },
        "vision_config": {
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_heads": 4,
            "out_hidden_size": 64,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0, 1],
        },
        "text_config": text_config(TEXT_VOCABULARY, 4, **moe, eos_token_id=IM_END, pad_token_id=PAD),
    }
    talker = {
        **ids,
        "text_config": text_config(CODEBOOK + SPECIALS, 2, **moe, shared_expert_intermediate_size=32),
        "code_predictor_config": text_config(
            CODEBOOK, 2, num_code_groups=GROUPS, max_position_embeddings=64, rope_parameters=ROPE
        ),
        "num_code_groups": GROUPS,
        "thinker_hidden_size": 64,
        "accept_hidden_layer": 2,
        "spatial_merge_size": 2,
        "codec_pad_id": CODEBOOK,
        "codec_bos_id": CODEBOOK + 1,
        "codec_eos_token_id": CODEBOOK + 2,
        "codec_nothink_id": CODEBOOK + 3,
        "codec_think_bos_id": CODEBOOK + 4,
        "codec_think_eos_id": CODEBOOK + 5,
        "speaker_id": {"chelsie": CODEBOOK + 8, "ethan": CODEBOOK + 9},
    }
    decoder = {
        "codebook_size": CODEBOOK,
        "num_quantizers": GROUPS,
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
    return Qwen3OmniMoeConfig(
        thinker_config=thinker,
        talker_config=talker,
        code2wav_config=decoder | code2wav,
        im_start_token_id=IM_START,
        im_end_token_id=IM_END,
        tts_pad_token_id=TTS_PAD,
        tts_bos_token_id=TTS_BOS,
        tts_eos_token_id=TTS_EOS,
        system_token_id=SYSTEM,
        user_token_id=USER,
        assistant_token_id=ASSISTANT,
        initializer_range=0.3,
    )


def build(seed: int = 25, **code2wav: Any) -> Qwen3OmniMoeForConditionalGeneration:
    """The whole model, in evaluation mode. code2wav: see ``config``."""
    torch.manual_seed(seed)
    model: Any = Qwen3OmniMoeForConditionalGeneration(config(**code2wav)).eval()
    with torch.no_grad():  # with the default initialisation the convolutions explode or vanish: nothing to be heard
        for name, parameter in model.code2wav.named_parameters():
            if parameter.dim() >= 2 and "conv" in name:
                torch.nn.init.kaiming_normal_(parameter, a=1.0)
        model.code2wav.decoder[-1].conv.weight.mul_(0.012)
    return model  # type: ignore[no-any-return]


def save(directory: Path, seed: int = 25, **code2wav: Any) -> Path:
    """The same as a checkpoint directory."""
    build(seed, **code2wav).save_pretrained(directory)
    return directory
