"""The options of the ``llm`` engine; its request parameters are ``TextParams``."""

from __future__ import annotations

from omni_actors.stages.autoregressive.options import TextOptions


class LLMOptions(TextOptions, frozen=True, forbid_unknown_fields=True):
    """The options of a causal language model on transformers."""
