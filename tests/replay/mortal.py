"""A pipeline whose workers die on demand, requests to it, and checks of their outputs.

The engine of these tests repeats its input and kills its own process where a chunk demands it, once for each marker
file, so the moment of each death is exact. The payload of an output is a function of its request and position, so the
tests notice outputs that are repeated, reordered or missing.
"""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import AsyncIterator, Collection, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import trio

from omni_actors.config import Limits, Pipeline, Restart, Stage
from omni_actors.generation import Generation
from omni_actors.orchestrator.pieces import Input
from omni_actors.orchestrator.request import Request
from omni_actors.outputs import Output
from omni_actors.stages.echo.engine import payload
from omni_actors.system import OmniSystem
from tests.support.echo_systems import pid_of, wait_for

WATCHDOG_S = 60.0
STAGES = ("first", "second", "third")
PIECES, FAN_OUT, PAYLOAD_BYTES = 4, 2, 300
OF_A_PIECE = {"first": FAN_OUT, "third": FAN_OUT**3}
"""How many outputs for the client a stage makes of each piece of input."""
LIMITS = Limits(replays=3, retain_bytes=2_000_000)
NEVER_S = 3600.0

ENGINES = """
    import os, signal
    from omni_actors.stages.base import StageOutput
    from omni_actors.stages.echo.engine import EchoEngine

    class Mortal(EchoEngine):
        '''data["dies"]: (stage, where, marker); where: "feed", "before" or "after" an output, or at the "end".
        data["fickle"]: the output contains the process id, so that a replay differs.
        data["held"]: the first stage holds its last output back until a writer opens this named pipe.'''

        def feed(self, request_id, chunk):
            self.die_if_due(chunk.data, "feed")
            super().feed(request_id, chunk)

        def step(self):
            for output in super().step():
                self.die_if_due(output.data, "before")
                if "fickle" in output.data:
                    data = {**output.data, "pid": os.getpid()}
                    output = StageOutput(output.request_id, output.tensors, data, output.last)
                if output.last and self._stage == "first" and "held" in output.data:
                    open(output.data["held"]).close()
                yield output
                self.die_if_due(output.data, "after")
                if output.last:
                    self.die_if_due(output.data, "end")

        def die_if_due(self, data, where):
            for stage, place, marker in data.get("dies", ()):
                if (stage, place) == (self._stage, where) and not os.path.exists(marker):
                    open(marker, "x").close()
                    os.kill(os.getpid(), signal.SIGKILL)
"""
_numbers = itertools.count()


def pipeline(**options: Any) -> Pipeline:
    quick = Restart(intensity=1000, backoff_s=0.01, backoff_max_s=0.01)
    options = {"fan_out": FAN_OUT, "payload_bytes": PAYLOAD_BYTES, **options}

    def stage(**wiring: Any) -> Stage:
        return Stage(engine="mortal_engines:Mortal", options=options, deterministic=True, restart=quick, **wiring)

    return Pipeline(
        name="mortal",
        stages={
            "first": stage(accepts=("script",), emits="text"),
            "second": stage(inputs=("first",)),
            "third": stage(inputs=("second",), emits="audio"),
        },
        limits=LIMITS,
    )


def dies(at: int, stage: str, where: str) -> tuple[int, str, str, str]:
    """Describe a death of ``stage`` at piece number ``at``, to happen once."""
    return at, stage, where, os.path.join(os.environ["MARKERS"], str(next(_numbers)))


def ask(
    omni: OmniSystem,
    *deaths: tuple[int, str, str, str],
    size: int = 0,
    data: Mapping[str, Any] = MappingProxyType({}),
    **arguments: Any,
) -> Generation:
    """Submit a request. size: bytes of a tensor in each piece. data: more data of each piece."""
    pieces = [
        Input({"n": n, "dies": [where for at, *where in deaths if at == n], **data}, {"x": np.zeros(size, np.uint8)})
        for n in range(PIECES)
    ]
    return omni.submit({"script": pieces}, arguments.pop("modalities", ("text", "audio")), **arguments)


async def held_back(pieces: list[Input], at: int, arrived: trio.Event) -> AsyncIterator[Input]:
    """Yield pieces, those from number ``at`` on after the event: no worker that dies at one of them dies before it."""
    for piece in pieces[:at]:
        yield piece
    await arrived.wait()
    for piece in pieces[at:]:
        yield piece


async def read_and_kill(omni: OmniSystem, generation: Generation, *stages: str) -> list[Output]:
    """Read all outputs, and kill the workers of these stages when the first output has arrived.

    All replicas are ready again when this returns. Where all outputs were sent before the deaths, it waits for those.
    """
    victims, outputs = [pid_of(omni, stage) for stage in stages], []
    before = generations(omni)
    with trio.fail_after(WATCHDOG_S):
        async for output in generation:
            outputs.append(output)
            while victims:
                os.kill(victims.pop(), signal.SIGKILL)
    await wait_restarted(omni, {stage: before[stage] + 1 for stage in stages})
    return outputs


def record_of(generation: Generation) -> Request:
    return generation.stream.request


def check_exact(
    generation: Generation, outputs: list[Output], replays: int | None = None, *, stages: Collection[str] = OF_A_PIECE
) -> None:
    """The client got each output of ``stages`` once, and in order."""
    number = record_of(generation).number
    assert number is not None
    for stage in stages:
        of_a_piece = OF_A_PIECE[stage]
        mine = [output for output in outputs if output.stage == stage]
        assert [output.data["n"] for output in mine] == [seq // of_a_piece for seq in range(PIECES * of_a_piece)]
        assert [output.finished for output in mine] == [False] * (len(mine) - 1) + [True]
        for seq, output in enumerate(mine):
            assert np.array_equal(output.tensors["payload"].numpy(), payload(number, seq, PAYLOAD_BYTES))
    assert outputs[-1].metrics is not None
    if replays is not None:
        assert outputs[-1].metrics.replays == replays


def generations(omni: OmniSystem) -> dict[str, int]:
    return {stage: replicas[0].generation for stage, replicas in omni.health().stages.items()}


async def all_ready(omni: OmniSystem) -> None:
    await wait_restarted(omni, {})


async def wait_restarted(omni: OmniSystem, expected: Mapping[str, int]) -> None:
    """Wait until all replicas of all stages are ready, the first ones of those in ``expected`` in this generation or a
    later one.
    """

    def restarted() -> bool:
        stages = omni.health().stages
        return all(replica.state == "ready" for replicas in stages.values() for replica in replicas) and all(
            stages[stage][0].generation >= generation for stage, generation in expected.items()
        )

    await wait_for(omni, restarted)
