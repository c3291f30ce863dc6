"""A pipeline for the tests of the faces: short answers as text, and answers as sound that take as long as a test."""

from __future__ import annotations

from typing import Any

from omni_actors.config import Limits, Pipeline, Restart, Stage

ENDLESS = ("audio",)
"""The modality of answers that have a million outputs, one each few milliseconds."""
OUTPUT_BYTES, UNREAD_BYTES = 65_536, 4_194_304
"""Size of an output of such an answer, and ``limits.output_bytes``."""


def pipeline(**limits: Any) -> Pipeline:
    """Return the pipeline; the stages of the two modalities do not depend on each other."""
    endless = {"fan_out": 1_000_000, "step_s": 0.02, "payload_bytes": OUTPUT_BYTES}
    often = Restart(intensity=1000, backoff_s=0.01, backoff_max_s=0.01)
    stages = {
        "short": Stage(engine="echo", accepts=("script", "messages"), emits="text", restart=often),
        "endless": Stage(engine="echo", accepts=("script", "messages"), emits="audio", options=endless, restart=often),
    }
    return Pipeline(name="endless", stages=stages, limits=Limits(output_bytes=UNREAD_BYTES, **limits))
