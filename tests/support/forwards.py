"""What the forwards of a language model, a thinker or a talker compute."""

from __future__ import annotations

from typing import Any

import pytest


def record_forwards(engine: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list to which each forward of the engine adds how many positions of each sequence it computes."""
    counts: list[int] = []
    forward = engine._forward

    def recorded(rows: list[int], inputs: Any, *axes: Any) -> Any:
        counts.append(inputs if isinstance(inputs, int) else inputs.shape[1])
        return forward(rows, inputs, *axes)

    monkeypatch.setattr(engine, "_forward", recorded)
    return counts
