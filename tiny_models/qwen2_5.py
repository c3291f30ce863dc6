"""Tiny Qwen2.5-Omni checkpoints with random weights from a seed, in the layout of the real ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen2_5OmniConfig, Qwen2_5OmniForConditionalGeneration

from tiny_models import tokenizer as words

SYSTEM_PROMPT = "you are the sea"
"""The chat template's default system prompt; the real template has one, too."""
TOKENIZER = words.build(
    words.QWEN2_5,
    *("<tts_pad>", "<tts_text_bos>", "<tts_text_eod>", "<tts_text_bos_single>"),
    default_system=SYSTEM_PROMPT,
)
CODES = 64
"""Tokens of the codec, before the talker's special ones. (The real model has 8193.)"""
CODEC_PAD, CODEC_BOS, CODEC_EOS, CODEC_MASK = CODES, CODES + 1, CODES + 2, CODES + 4
TALKER_VOCABULARY = CODES + 8
SPEAKERS = {"Chelsie": "<tts_text_bos>", "Ethan": "<tts_text_bos_single>"}
"""And the token with which the talker begins for each."""
BLOCK, REPEATS, SAMPLES = 24, 2, 480
"""Frames of mel in a block of the DiT; frames of mel and samples of a code. All as the real ones."""
PREPROCESSOR = {
    "processor_class": "Qwen2_5OmniProcessor",
    "feature_extractor_type": "WhisperFeatureExtractor",
    "feature_size": 128,
    "sampling_rate": 16_000,
    "hop_length": 160,
    "n_fft": 400,
    "chunk_length": 30,
    "n_samples": 480_000,
    "nb_max_frames": 3_000,
    "dither": 0.0,
    "padding_side": "right",
    "padding_value": 0.0,
    "return_attention_mask": True,
    "image_processor_type": "Qwen2VLImageProcessor",
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    "min_pixels": 28 * 28,
    "max_pixels": 112 * 112,
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
}
"""The one file that configures the features of audio, images and videos: the real one, except for the pixels and the
window, to whose end every recording is filled up: the real one's 300 s take their time."""

ATTENTION = {
    "max_position_embeddings": 4096,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [4, 2, 2]},
    "initializer_range": 0.3,
}
AUDIO = {
    "num_mel_bins": 128,
    "encoder_layers": 2,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "d_model": 32,
    "output_dim": 64,
    "initializer_range": 0.1,
}
VISION = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 4,
    "window_size": 56,
    "out_hidden_size": 64,
    "fullatt_block_indexes": [1],
    "initializer_range": 0.1,
}
DIT = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "head_dim": 16,
    "emb_dim": 32,
    "block_size": BLOCK,
    "look_ahead_layers": [1],
    "look_backward_layers": [0, 2],
    "repeats": REPEATS,
    "num_embeds": TALKER_VOCABULARY,
    "enc_emb_dim": 32,
    "enc_dim": 16,
    "enc_channels": [16, 16, 16, 16, 48],
    "enc_attention_channels": 8,
    "enc_se_channels": 8,
    "max_position_embeddings": 4096,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}


def token(text: str) -> int:
    id_: int = TOKENIZER.convert_tokens_to_ids(text)
    return id_


def config(**bigvgan: Any) -> Qwen2_5OmniConfig:
    """bigvgan: changes of the vocoder's part."""
    vocoder = {
        "upsample_initial_channel": 64,
        "resblock_kernel_sizes": [3],
        "resblock_dilation_sizes": [[1, 3, 5]],
    }
    return Qwen2_5OmniConfig(
        thinker_config=_thinker(),
        talker_config=_talker(),
        token2wav_config={"dit_config": DIT, "bigvgan_config": vocoder | bigvgan},
    )


def _marks() -> dict[str, int]:
    """The tokens of media, which both language models know."""
    marks = words.QWEN2_5
    return {
        "audio_token_index": token(marks.audio),
        "image_token_index": token(marks.image),
        "video_token_index": token(marks.video),
        "audio_start_token_id": token(marks.audio_bos),
        "audio_end_token_id": token(marks.audio_eos),
        "vision_start_token_id": token(marks.vision_bos),
        "vision_end_token_id": token(marks.vision_eos),
    }


def _thinker() -> dict[str, Any]:
    return {
        **_marks(),
        "user_token_id": token("user"),
        "audio_config": AUDIO,
        "vision_config": VISION,
        "text_config": {
            **ATTENTION,
            "vocab_size": len(TOKENIZER),
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "eos_token_id": token(words.IM_END),
            "pad_token_id": token(words.PAD),
        },
        "initializer_range": 0.3,
    }


def _talker() -> dict[str, Any]:
    return {
        **_marks(),
        **ATTENTION,
        "vocab_size": TALKER_VOCABULARY,
        "embedding_size": 64,
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "tts_text_start_token_id": token("<tts_text_bos>"),
        "tts_text_end_token_id": token("<tts_text_eod>"),
        "tts_text_pad_token_id": token("<tts_pad>"),
        "tts_codec_pad_token_id": CODEC_PAD,
        "tts_codec_start_token_id": CODEC_BOS,
        "tts_codec_end_token_id": CODEC_EOS,
        "tts_codec_mask_token_id": CODEC_MASK,
    }


def build(
    seed: int = 0, *, text_eos: float = 1.0, codec_eos: float = 1.0, **bigvgan: Any
) -> Qwen2_5OmniForConditionalGeneration:
    """The whole model, in evaluation mode, with its speakers. bigvgan: see ``config``.

    text_eos, codec_eos: factors of the rows of the end in the two heads; with 0 the end is never the most likely.
    """
    torch.manual_seed(seed)
    model: Any = Qwen2_5OmniForConditionalGeneration(config(**bigvgan)).eval()
    with torch.no_grad():
        # With the default initialisation the vocoder vanishes and the attention of the DiT sees nothing.
        for name, parameter in model.token2wav.named_parameters():
            if "bigvgan" in name and parameter.dim() == 3:
                torch.nn.init.kaiming_normal_(parameter, a=1.0).mul_(0.9)
            elif "dit" in name and parameter.dim() == 2:
                torch.nn.init.normal_(parameter, std=1.0 if "codec_embed" in name else 0.15)
        model.token2wav.code2wav_bigvgan_model.conv_post.weight.mul_(0.1)
    scale_ends(model, text_eos, codec_eos)
    model.speaker_map = speakers(seed)
    return model  # type: ignore[no-any-return]


@torch.no_grad()
def scale_ends(model: Any, text_eos: float, codec_eos: float) -> None:
    """Name the end of an answer, and scale its rows in the two heads; with 0 it is never the most likely."""
    model.thinker.lm_head.weight[token(words.IM_END)] *= text_eos
    model.talker.codec_head.weight[[CODEC_PAD, CODEC_EOS]] *= codec_eos
    model.generation_config.eos_token_id = token(words.IM_END)
    model.generation_config.pad_token_id = token(words.PAD)


def speakers(seed: int = 0) -> dict[str, dict[str, Any]]:
    random = torch.Generator().manual_seed(seed)
    return {
        name: {
            "bos_token": token(bos),
            "cond": torch.randn(1, 32, generator=random),
            "ref_mel": torch.randn(1, 30, 80, generator=random),
        }
        for name, bos in SPEAKERS.items()
    }


def save(directory: Path, seed: int = 0, **options: Any) -> Path:
    """The same as a checkpoint directory, with all that a processor is loaded from. options: see ``build``."""
    build(seed, **options).save_pretrained(directory)
    save_processor(directory, seed)
    return directory


def save_processor(directory: Path, seed: int = 0) -> None:
    """Save what belongs to a checkpoint beside its weights."""
    torch.save(speakers(seed), directory / "spk_dict.pt")
    words.save(TOKENIZER, directory)
    (directory / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR))
