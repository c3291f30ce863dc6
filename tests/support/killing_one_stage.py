"""BAGEL in one stage that logs its steps, and kills its worker at one of them.

Options, besides those of the engine: ``log``, a file that gets a line with the number of each step that has a
checkpoint (all but the last one); and ``plan``, a file that a test writes: JSON, [step, kept]. It is removed before
the process is killed. kept: whether that step's checkpoint is kept before.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from omni_actors.stages.bagel.one_stage import OneStageEngine
from omni_actors.stages.base import StageCheckpoint, StageContext


class KillingOneStage(OneStageEngine):
    """For one request at a time."""

    def __init__(self, context: StageContext) -> None:
        options = dict(context.options)
        self._log, self._plan = Path(options.pop("log")), Path(options.pop("plan"))
        super().__init__(msgspec.structs.replace(context, options=options))

    def warm_up(self) -> None:
        """Compute nothing: the log is of the test's requests alone."""

    def step(self) -> Iterator[Any]:
        for event in super().step():
            if not isinstance(event, StageCheckpoint):
                yield event
                continue
            with self._log.open("a") as log:
                log.write(f"{event.data['step']}\n")
            self._kill(event.data["step"], kept=False)
            yield event
            self._kill(event.data["step"], kept=True)

    def _kill(self, step: int, *, kept: bool) -> None:
        if self._plan.exists() and json.loads(self._plan.read_text()) == [step, kept]:
            self._plan.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
