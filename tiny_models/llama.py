"""Tiny Llama checkpoints with random weights from a seed, and a byte-level tokenizer with a chat template."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def save_tokenizer(path: Path) -> int:
    """A byte-level tokenizer with a chat template, from a corpus of a few words. Returns its size."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(["system\n", "user\n", "assistant\n", "the fox and the sea"] * 9, trainer)
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in ("<|im_start|>", "<|im_end|>")])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", chat_template=TEMPLATE)
    fast.save_pretrained(path)
    return len(fast)


def save_model(path: Path, seed: int = 0, **config: Any) -> Path:
    torch.manual_seed(seed)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"num_hidden_layers": 2, "max_position_embeddings": 128, "vocab_size": save_tokenizer(path)}
    # Weights far larger than usual: each step's best token is clear, and depends on everything before it.
    llama = LlamaForCausalLM(LlamaConfig(**{"initializer_range": 0.6, "eos_token_id": None, **sizes, **config}))
    llama.save_pretrained(path)
    return path
