"""What the tests of prefill apart from decode on vLLM share: a tiny model, and requests to it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.vllm_options import ENGINE_ARGS
from tiny_models.llama import save_model

BLOCK = 32
"""Positions of a block of vLLM's cache, the fewest that it has on a CPU."""
CONTEXT = 256
ARGS: dict[str, Any] = {
    **ENGINE_ARGS,
    "block_size": BLOCK,
    "max_model_len": CONTEXT,
    "logits_processors": ["tests.vllm.processors:Own"],
}
PARAMS: dict[str, Any] = {"ignore_eos": True, "temperature": 1.0, "seed": 5, "extra_args": {"own_logits": True}}
"""Tokens that no rounding changes, each of which depends on all before it (``tests.support.clear_choices``)."""
IDS: dict[str, Any] = {**PARAMS, "max_tokens": 8, "detokenize": False}
"""Outputs with token ids."""


def save(directory: Path) -> Path:
    """Save a checkpoint whose heads are as small as vLLM takes on a CPU."""
    sizes = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
    return save_model(directory, max_position_embeddings=CONTEXT, **sizes)


def ids(outputs: list[Any]) -> list[int]:
    """Return the token ids of an answer."""
    return [token for output in outputs for token in output.data["token_ids"]]
