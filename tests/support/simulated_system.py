"""A system over simulated workers, for clients that read slowly: the real loops on real rings, in virtual time.

Each step of the engine takes a millisecond and outputs ``PIECE`` bytes. Tests use the fixture ``autojump_clock``.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import trio

from omni_actors.config import Limits, Pipeline, Stage
from omni_actors.generation import Generation
from omni_actors.orchestrator.pieces import Input
from omni_actors.outputs import Output
from omni_actors.stages.echo.engine import EchoEngine
from omni_actors.stress.simulation.spawner import SimulatedSpawner
from omni_actors.stress.simulation.worker import WorkerBehavior
from omni_actors.system import OmniSystem

PIECE, PIECES = 10_000, 100
WATCHDOG_S = 1000.0
"""Virtual."""


class NotPausable(EchoEngine):
    """An engine that does not implement ``Pausable``."""

    pause = resume = None  # type: ignore[assignment]


NOT_PAUSABLE = f"{__name__}:NotPausable"


class SimulatedSystem(NamedTuple):
    omni: OmniSystem
    spawner: SimulatedSpawner

    def ask(self, *, whole: bool | None = False, pieces: int = PIECES, **more: Any) -> Generation:
        """A request of ``pieces`` outputs. whole: as in ``OutputStream.relay``; None: of a caller of the library."""
        inputs = {"script": [Input({"n": i}) for i in range(pieces)]}
        generation = self.omni.submit(inputs, ["audio"], **more)
        if whole is not None:
            generation.stream.relay(whole=whole)
        return generation

    def gauge(self, name: str) -> float:
        value = self.omni.metrics.registry.get_sample_value(f"omni_{name}")
        assert value is not None
        return value

    @property
    def unread(self) -> float:
        return self.gauge("unread_bytes")

    def ended(self, outcome: str) -> float:
        return self.omni.metrics.registry.get_sample_value("omni_requests_total", {"outcome": outcome}) or 0.0

    async def until_paused(self, count: int = 1) -> None:
        await until(lambda: self.gauge("requests_paused") == count)
        await trio.sleep(1)  # what was on its way has come


async def until(condition: Callable[[], bool]) -> None:
    with trio.fail_after(WATCHDOG_S):
        while not condition():  # noqa: ASYNC110 - the time is virtual
            await trio.sleep(0.1)


async def read(generation: Generation) -> list[Output]:
    with trio.fail_after(WATCHDOG_S):
        return [output async for output in generation]


def numbers(outputs: list[Output]) -> list[int]:
    return [output.data["n"] for output in outputs]


@asynccontextmanager
async def open_simulated_system(engine: str = "echo", **limits: Any) -> AsyncIterator[SimulatedSystem]:
    """Two stages: what the first gives is small, what the second gives is not."""
    pipeline = Pipeline(
        name="readers",
        stages={
            "first": Stage(engine=engine, accepts=("script",)),
            "second": Stage(engine=engine, inputs=("first",), emits="audio", options={"payload_bytes": PIECE}),
        },
        limits=Limits(**{"window_bytes": 100_000, **limits}),
    )
    spawner = SimulatedSpawner(lambda address, pid: WorkerBehavior(turn_s=0.001), lambda line: None)
    async with OmniSystem.open(pipeline, spawner=spawner) as omni:
        yield SimulatedSystem(omni, spawner)
