"""Pauses a simulated system, and puts stages of it to sleep, while faults hit it."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Literal, get_args

import trio

from omni_actors.stress.controls import Controls
from omni_actors.stress.schedule import PauseGeneration, Sleep
from omni_actors.stress.simulation.journal import Journal
from omni_actors.stress.workload import Workload
from omni_actors.system import OmniSystem

FOR_MS = (0, 10, 1000, 5000)
Mode = Literal["abort", "wait", "keep"]


class SimulatedControls:
    """Draws the controls of one schedule. ``nursery`` outlives the system; ``use`` is called when that is open."""

    nursery: trio.Nursery

    def __init__(self, draw: random.Random, workload: Workload, journal: Journal) -> None:
        self._draw, self._workload, self._journal = draw, workload, journal
        self._controls: Controls
        self._slept: str | None = None
        """The stage of the last sleep."""

    def use(self, omni: OmniSystem) -> Controls:
        """Control this system from now on."""
        self._controls = Controls(omni, self._workload, Path(), trio.current_time)
        return self._controls

    def pause(self) -> None:
        """Pause generation for a time."""
        mode: Mode = self._draw.choice(get_args(Mode))
        operation = PauseGeneration(mode, self._draw.choice(FOR_MS))
        self._journal.injected(f"pause, {mode}")
        self._journal.note(f"{operation}")
        self._controls.start(operation, self.nursery)

    def sleep(self) -> None:
        """Let a stage sleep for a time; often the same one as before, so that its sleeps overlap."""
        if self._draw.random() < 0.5 or self._slept is None:
            self._slept = self._draw.choice(self._workload.stages)
        operation = Sleep(self._slept, self._draw.choice(FOR_MS))
        self._journal.injected("sleep")
        self._journal.note(f"{operation}")
        self._controls.start(operation, self.nursery)
