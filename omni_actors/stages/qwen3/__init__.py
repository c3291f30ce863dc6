"""Qwen3-Omni's stages."""

from __future__ import annotations

from omni_actors.stages.qwen3.code2wav import Code2WavEngine

__all__ = ["Code2WavEngine"]
