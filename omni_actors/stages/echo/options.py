"""The options and request parameters of the ``echo`` engine."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from omni_actors.stages.adapters.options import Lora
from omni_actors.stages.bounds import Positive, Seconds


class EchoOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The simulated cost and the outputs of ``echo``."""

    step_s: Seconds = 0.0
    """Simulated duration of each step, in seconds."""
    spin: bool = False
    """Spend ``step_s`` computing, as a model on the CPU does, instead of sleeping, as one on an accelerator does."""
    fan_out: Positive = 1
    """Output chunks for each input chunk."""
    payload_bytes: Annotated[int, Meta(ge=0)] = 0
    """Size of a uint8 tensor ``payload`` that is added to each output; 0 adds none."""
    steps: Annotated[int, Meta(ge=0)] = 0
    """Steps that each output takes, each of which ends with a checkpoint; 0: one step without a checkpoint. The stage
    must be configured as resumable for its checkpoints to be kept."""
    load_s: Seconds = 0.0
    """Duration of loading."""


class EchoParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The request parameters of ``echo``."""

    lora: Lora | None = None
    """The LoRA adapter of this request. It adds its name and the hash of its files to each text."""
