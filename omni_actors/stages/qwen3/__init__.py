"""Qwen3-Omni's stages: imported by name, so that a worker loads what its own needs."""
