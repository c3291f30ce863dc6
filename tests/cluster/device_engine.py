"""An engine for a stage that has devices, which needs none."""

from __future__ import annotations

from omni_actors.stages.base import StageContext
from omni_actors.stages.echo.engine import EchoEngine


def without_devices(context: StageContext) -> EchoEngine:
    return EchoEngine(StageContext(context.stage, None, context.options, 1, "cpu", context.report))
