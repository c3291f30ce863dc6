"""A system of two stages on simulated workers in virtual time, whose second stage is scaled."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import trio

from omni_actors.config import Pipeline, Stage
from omni_actors.generation import Generation
from omni_actors.orchestrator.pieces import Input
from omni_actors.protocol.messages import Address
from omni_actors.stress.simulation.spawner import SimulatedSpawner
from omni_actors.stress.simulation.worker import WorkerBehavior
from omni_actors.system import OmniSystem
from tests.support.echo_systems import OFTEN

WATCHDOG_S = 1000.0
LOAD_S = 2.0


class Scaling:
    """A system of two stages on simulated workers, which load for ``LOAD_S`` and make a step in 0.1 s."""

    def __init__(self) -> None:
        self.spawner = SimulatedSpawner(self._behavior_of, lambda note: None)
        self.behavior = WorkerBehavior(load_s=LOAD_S, turn_s=0.1)
        self.of_replica = dict[int, WorkerBehavior]()
        """The behavior of workers of the second stage, by replica, where it is not ``behavior``."""
        self.omni: OmniSystem

    def _behavior_of(self, address: Address, pid: int) -> WorkerBehavior:
        return self.of_replica.get(address.replica, self.behavior) if address.stage == "second" else self.behavior

    def ask(self, pieces: int = 3, **terms: Any) -> Generation:
        return self.omni.submit({"script": [Input({"n": i}) for i in range(pieces)]}, ["audio"], **terms)

    @property
    def states(self) -> dict[int, str]:
        """The states of the second stage's replicas."""
        return {each.replica: each.state for each in self.omni.health().stages["second"]}

    def loads(self) -> dict[int, int]:
        return {number: self.omni._orchestrator.pools.loads[Address("second", number)] for number in self.states}


async def numbers(generation: Generation) -> list[int]:
    return [output.data["n"] async for output in generation]


@asynccontextmanager
async def opened(**second: Any) -> AsyncIterator[Scaling]:
    scaling = Scaling()
    stages = {
        "first": Stage(engine="echo", accepts=("script",), restart=OFTEN),
        "second": Stage(**{"engine": "echo", "inputs": ("first",), "emits": "audio", "restart": OFTEN} | second),
    }
    with trio.fail_after(WATCHDOG_S):
        async with OmniSystem.open(Pipeline(name="scaled", stages=stages), spawner=scaling.spawner) as scaling.omni:
            yield scaling
    assert all(ring.closed for ring in scaling.spawner.all_rings())
