"""What an engine is made with, outside a worker."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omni_actors.stages.base import StageContext

DEVICE = os.environ.get("OMNI_ACTORS_TEST_DEVICE", "cpu")
"""Where the engines of tests that run them in this process compute."""


def stage_context(
    options: Mapping[str, Any] | None = None, *, stage: str = "here", model: Path | None = None, threads: int = 1
) -> StageContext:
    """Return the context of a stage that computes on ``DEVICE`` and whose progress in loading nothing reads."""
    return StageContext(
        stage=stage, model=model, options=options or {}, threads=threads, device=DEVICE, report=lambda note: None
    )
