"""The echo engine with a log of its life, by which a test sees which processes could work at which times."""

from __future__ import annotations

import os
import threading
import time

from omni_actors.stages import base
from omni_actors.stages.echo.engine import EchoEngine

LOG = "OMNI_ACTORS_TEST_WRITERS"
"""The environment variable that has the path of the log."""
PERIOD_S = 0.005


class Writing(EchoEngine):
    """A thread writes a line every ``PERIOD_S`` until the process ends: the stage, the process, and the time in ns."""

    def __init__(self, context: base.StageContext) -> None:
        super().__init__(context)
        threading.Thread(target=self._write, daemon=True).start()

    def _write(self) -> None:
        with open(os.environ[LOG], "ab", buffering=0) as log:
            while True:
                now = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
                log.write(f"{self._stage} {os.getpid()} {now}\n".encode())
                time.sleep(PERIOD_S)
