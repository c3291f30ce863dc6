"""The ``llm`` engine: a causal language model with continuous batching (see ``engine``)."""

from __future__ import annotations

from omni_actors.stages.llm.engine import open_engine

__all__ = ["open_engine"]
