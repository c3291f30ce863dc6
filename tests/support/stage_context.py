"""What an engine is made with, outside a worker."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omni_actors.stages.base import StageContext


def stage_context(
    options: Mapping[str, Any] | None = None, *, stage: str = "here", model: Path | None = None, threads: int = 1
) -> StageContext:
    """Return the context of a stage that computes on the CPU and whose progress in loading nothing reads."""
    return StageContext(
        stage=stage, model=model, options=options or {}, threads=threads, device="cpu", report=lambda note: None
    )
