"""The echo engine with a log of its steps, by which a test sees which processes worked at which times."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

from omni_actors.stages import base
from omni_actors.stages.echo.engine import EchoEngine

LOG = "OMNI_ACTORS_TEST_WRITERS"
"""The environment variable that has the path of the log."""


class Writing(EchoEngine):
    """Writes a line before each step: its stage, its process, and the machine's time in ns."""

    def step(self) -> Iterator[base.StageOutput | base.StageFailure | base.StageCheckpoint]:
        with open(os.environ[LOG], "a") as log:
            log.write(f"{self._stage} {os.getpid()} {time.clock_gettime_ns(time.CLOCK_BOOTTIME)}\n")
        yield from super().step()
