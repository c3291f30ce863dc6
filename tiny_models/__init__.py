"""Tiny checkpoints with random weights, for tests and benchmarks. Nothing here is part of the distribution."""

from __future__ import annotations
