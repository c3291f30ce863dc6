"""The parts of the llm engine by themselves: cache, sampling, text, packed layers, prompt."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="the voice extra is not installed")
