"""The measured pipelines, each streamed and gathered.

compute: Qwen3-Omni's stages on a random checkpoint whose stages cost about the same on one core.
waiting: three stages whose steps take time and no CPU, as if each had an accelerator. Its result does not depend on how
the kernel schedules the stages on few cores.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from bench.omni.gathered import FACTORY
from omni_actors.config import Pipeline, Stage
from tiny_models import qwen3 as tiny

TOKENS = FRAMES = 200
PROMPT = "please tell me a long story about the sea , and of the people who live there ."
STEP_S = 0.02
TALKER_NICE, CODE2WAV_NICE = 1, 5
"""The stages share two cores. The thinker, which makes the first text, has the highest priority."""
CHECKPOINT: dict[str, Any] = {
    "seed": 1,
    "text_eos": 0.0,
    "codec_eos": 0.0,
    "hidden": 1024,
    "layers": 14,
    "experts": 16,
    "talker_hidden": 512,
    "talker_layers": 8,
    "hidden_size": 192,
    "decoder_dim": 256,
    "num_hidden_layers": 4,
    "sliding_window": 72,
}
"""Options of ``tiny_models.qwen3.save``; the checkpoint has 148 MB."""


class Scenario(msgspec.Struct, frozen=True):
    """A pipeline, and the parameters of its requests."""

    name: str
    stages: dict[str, Stage]
    params: dict[str, Any]

    def pipeline(self, *, streamed: bool, speaks: bool = True) -> Pipeline:
        """Return the pipeline. streamed: or gathered. speaks: with the stages behind the thinker."""
        stages = {name: stage for name, stage in self.stages.items() if speaks or name == "thinker"}
        if not streamed:
            stages = {name: _gathered(stage) if stage.inputs else stage for name, stage in stages.items()}
        return Pipeline(name=self.name, stages=stages)


def compute(directory: Path) -> Scenario:
    """Return the scenario. directory: the checkpoint's, which this makes if it does not exist."""
    if not (directory / "config.json").exists():
        tiny.save(directory, **CHECKPOINT)
    batch = {"max_batch": 32}
    model = str(directory)
    return Scenario(
        "compute",
        {
            "thinker": Stage(
                engine="qwen3_thinker", model=model, accepts=("messages",), emits="text", threads=1, options=batch
            ),
            "talker": Stage(
                engine="qwen3_talker", model=model, inputs=("thinker",), threads=1, nice=TALKER_NICE, options=batch
            ),
            # Its work grows with its batch, unlike that of the other stages, so one core would fall behind.
            "code2wav": Stage(
                engine="qwen3_code2wav",
                model=model,
                inputs=("talker",),
                emits="audio",
                threads=1,
                nice=CODE2WAV_NICE,
                replicas=2,
            ),
        },
        {"max_tokens": TOKENS, "talker_max_tokens": FRAMES + 1, "talker_temperature": 0.0},
    )


def waiting() -> Scenario:
    """Return the scenario. Each step of a stage makes one chunk of every request, whatever their number."""
    cost = {"step_s": STEP_S}
    return Scenario(
        "waiting",
        {
            "thinker": Stage(
                engine="echo",
                accepts=("messages",),
                emits="text",
                threads=1,
                options={**cost, "fan_out": TOKENS},
            ),
            "talker": Stage(engine="echo", inputs=("thinker",), threads=1, options=cost),
            "code2wav": Stage(engine="echo", inputs=("talker",), emits="audio", threads=1, options=cost),
        },
        {},
    )


def _gathered(stage: Stage) -> Stage:
    return msgspec.structs.replace(stage, engine=FACTORY, options={"engine": stage.engine, **stage.options})
