"""Options of the vllm engines under test."""

from __future__ import annotations

from typing import Any

ENGINE_ARGS: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "kv_cache_memory_bytes": 1 << 28,
    "max_model_len": 1024,
    "max_num_batched_tokens": 64,
    "max_num_seqs": 8,
}
"""Prompts are prefilled in pieces of 64 tokens."""
TEXT_ARGS: dict[str, Any] = {
    "enable_prompt_embeds": True,
    "logits_processors": ["tests.vllm.processors:Only", "tests.vllm.processors:Own"],
    "scheduling_policy": "priority",
}
"""Besides, of the ``vllm`` engine."""
