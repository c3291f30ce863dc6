"""The model's tokenizer and its text encoder: a tiny Qwen2.5-VL whose weights are drawn from a seed and never trained.

The words of the captions are one token each. A word has one embedding, however it is written: "Red" at the beginning of
a prompt is " red". The layers add little to the embeddings, so a row of the hidden states tells its word.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, Qwen2Tokenizer

from shapes.captions import WORDS
from shapes.drawings import DIGITS
from tiny_models import tokenizer as words

WIDTH = 64
"""Numbers of a row of the hidden states."""
TEMPLATE = (
    "<|im_start|>system\nDescribe the image by detailing the color, shape, size, texture, quantity, text, spatial"
    " relationships of the objects and background:<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
)
"""Qwen-Image's, whose first ``DROPPED`` tokens it drops."""
DROPPED = 34
_ROLES = ("assistant", "system", "Describe", "user")


def tokenizer() -> Qwen2Tokenizer:
    instruction = TEMPLATE[TEMPLATE.index(" the") : TEMPLATE.index(":")].replace(",", "").split()
    spaced = dict.fromkeys(f" {word}" for word in (*instruction, *WORDS))
    spaced |= dict.fromkeys(f" {word.capitalize()}" for word in WORDS)
    bare = [*_ROLES, *dict.fromkeys(form for word in WORDS for form in (word, word.capitalize()))]
    while True:
        tokens = words.build(words.QWEN3, words=(*spaced, *bare))
        split = [word for word in bare if len(tokens(word).input_ids) > 1]
        if not split:
            return tokens
        bare = [*split, *(word for word in bare if word not in split)]  # another word's merge came first


def encoder(tokens: Qwen2Tokenizer, seed: int = 0) -> Qwen2_5_VLForConditionalGeneration:
    marks = words.QWEN3
    text = {
        "hidden_size": WIDTH,
        "intermediate_size": WIDTH,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "vocab_size": len(tokens),
        "max_position_embeddings": 4096,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [4, 6, 6]},
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": tokens.eos_token_id,
    }
    vision = {
        "depth": 1,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_heads": 2,
        "window_size": 56,
        "out_hidden_size": WIDTH,
        "fullatt_block_indexes": [0],
    }
    names = {"image_token_id": marks.image, "video_token_id": marks.video}
    names |= {"vision_start_token_id": marks.vision_bos, "vision_end_token_id": marks.vision_eos}
    ids = {name: tokens.convert_tokens_to_ids(mark) for name, mark in names.items()}
    torch.manual_seed(seed)
    make: Any = Qwen2_5_VLForConditionalGeneration
    config = Qwen2_5_VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=True, **ids)
    model: Qwen2_5_VLForConditionalGeneration = make(config).eval().requires_grad_(False)
    model.get_input_embeddings().weight.copy_(_embeddings(tokens))
    return model


def _embeddings(tokens: Qwen2Tokenizer) -> Tensor:
    """A random row for each token, the same for all that spell one word; a numeral is the word."""
    spelled = tokens.convert_ids_to_tokens(list(range(len(tokens))))
    folded = [token.removeprefix("Ġ").lower() for token in spelled]
    folded = [DIGITS[int(each)] if each in "0123456789" and each else each for each in folded]
    places = {word: place for place, word in enumerate(dict.fromkeys(folded))}
    rows = torch.randn(len(places), WIDTH)
    return rows[torch.tensor([places[each] for each in folded])]


@torch.no_grad()
def encode(model: Qwen2_5_VLForConditionalGeneration, tokens: Qwen2Tokenizer, texts: list[str]) -> list[Tensor]:
    """Return the hidden states of each prompt as Qwen-Image takes them: float32 (n, WIDTH)."""
    rows = []
    for text in texts:
        ids = tokens(TEMPLATE.format(text), return_tensors="pt").input_ids
        rows.append(model(input_ids=ids, output_hidden_states=True).hidden_states[-1][0, DROPPED:])
    return rows
