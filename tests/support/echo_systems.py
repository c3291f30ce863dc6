"""Pipelines of echo engines, requests to them, and waiting for what becomes of their workers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import trio

from omni_actors.config import Pipeline, Restart, Stage
from omni_actors.generation import Generation
from omni_actors.orchestrator.pieces import Input
from omni_actors.outputs import Output
from omni_actors.system import OmniSystem

WATCHDOG_S = 60.0
OFTEN = Restart(intensity=1000, backoff_s=0.01, backoff_max_s=0.01)
"""Restarts at once, however often."""


def one_stage(engine: str = "echo", **more: Any) -> Pipeline:
    """A pipeline of one stage, "only", which is restarted at once. more: further configuration of the stage."""
    more = {"accepts": ("script",), "emits": "audio", "restart": OFTEN, **more}
    return Pipeline(name="alone", stages={"only": Stage(engine=engine, **more)})


def two_stages() -> Pipeline:
    """Stages "first" and "second", listed in reverse order, with rings that are small for the inputs of tests."""
    small: dict[str, Any] = {"engine": "echo", "restart": OFTEN, "ring_bytes": 4096}
    stages = {
        "second": Stage(inputs=("first",), emits="audio", **small),
        "first": Stage(accepts=("script",), emits="text", **small),
    }
    return Pipeline(name="small", stages=stages)


def ask(omni: OmniSystem, modalities: tuple[str, ...] = ("audio",), /, *, text: str = "x", **echo: Any) -> Generation:
    """Submit a request of one chunk that is never replayed. echo: the failures that it asks the engines for."""
    return omni.submit({"script": [Input({"text": text, "echo": echo})]}, modalities, on_failure="fail")


async def words_until(event: trio.Event, *words: str) -> AsyncIterator[str]:
    """Yield words for a script, the last of them after the event: no worker has finished the answer before it."""
    for word in words[:-1]:
        yield word
    await event.wait()
    yield words[-1]


async def read(generation: Generation) -> list[Output]:
    with trio.fail_after(WATCHDOG_S):
        return [output async for output in generation]


async def until(condition: Callable[[], bool]) -> None:
    """Poll until the condition holds."""
    with trio.fail_after(WATCHDOG_S):
        while not condition():  # noqa: ASYNC110 - no event announces the condition
            await trio.sleep(0.002)


async def wait_for(omni: OmniSystem, condition: Callable[[], bool]) -> None:
    """Wait until ``condition`` holds, which is evaluated whenever the state of a replica changes."""
    with trio.fail_after(WATCHDOG_S):
        while not condition():
            await omni.wait_changed()


async def wait_restarted(omni: OmniSystem, stage: str, generation: int, replica: int = 0) -> None:
    """Wait until a replica is ready in this generation or a later one."""

    def restarted() -> bool:
        health = omni.health().stages[stage][replica]
        return health.state == "ready" and health.generation >= generation

    await wait_for(omni, restarted)


def generation_of(omni: OmniSystem, stage: str) -> int:
    return omni.health().stages[stage][0].generation


def pid_of(omni: OmniSystem, stage: str, replica: int = 0) -> int:
    pid = omni.health().stages[stage][replica].pid
    assert pid is not None
    return pid
