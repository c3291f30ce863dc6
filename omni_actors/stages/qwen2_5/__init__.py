"""Qwen2.5-Omni's stages: imported by name, so that a worker loads what its own needs."""
