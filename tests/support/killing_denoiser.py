"""Qwen-Image's denoiser that logs its steps, and kills a process at a place of a step.

Options, besides those of the denoiser: ``log``, a file that gets a line with the number of each step that was computed;
and ``plan``, a file that a test writes: JSON, [step, place, pid]. It is removed before that process is killed; a pid of
0 is the denoiser's own. Places: "begin" of a step, "computed" (nothing of the step was sent), "sent".
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from torch import Tensor

from omni_actors.stages.base import StageContext, StageRequest
from omni_actors.stages.qwen_image.denoiser import DenoiserEngine
from omni_actors.stages.qwen_image.denoising import Denoising
from omni_actors.stages.qwen_image.options import DenoiserParams

PLACES = ("begin", "computed", "sent")


class KillingDenoiser(DenoiserEngine):
    """For one request at a time."""

    def __init__(self, context: StageContext) -> None:
        options = dict(context.options)
        self._log, self._plan = Path(options.pop("log")), Path(options.pop("plan"))
        super().__init__(msgspec.structs.replace(context, options=options))

    def _new_request(self, request: StageRequest) -> Denoising:
        known = {name: value for name, value in request.params.items() if name in DenoiserParams.__struct_fields__}
        return super()._new_request(msgspec.structs.replace(request, params=known))

    def _advance(self, requests: list[Denoising], velocities: list[Tensor]) -> Iterator[Any]:
        [request] = requests
        step = request.step + 1
        self._kill(step, "begin")
        events = list(super()._advance(requests, velocities))
        with self._log.open("a") as log:
            log.write(f"{step}\n")
        self._kill(step, "computed")
        yield from events
        self._kill(step, "sent")

    def _kill(self, step: int, place: str) -> None:
        if not self._plan.exists():
            return
        *when, pid = json.loads(self._plan.read_text())
        if when == [step, place]:
            self._plan.unlink()
            os.kill(pid or os.getpid(), signal.SIGKILL)
