"""Several generations that one response relays: what reading them costs, and that none waits for its own output."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator

import pytest
import trio

from omni_actors.serve.api.generations import Generations
from omni_actors.system import OmniSystem
from tests.support.echo_systems import WATCHDOG_S

OUTPUTS = 20


class SpawnedTasks(trio.abc.Instrument):
    """Counts the tasks that begin."""

    count = 0

    def task_spawned(self, task: trio.lowlevel.Task) -> None:
        self.count += 1


@pytest.fixture
async def omni() -> AsyncIterator[OmniSystem]:
    """Each output is larger than what a stream may have unread."""
    large = {"stages.first.options": {"fan_out": OUTPUTS, "payload_bytes": 5000}, "limits.window_bytes": 1000}
    async with OmniSystem.open("echo", overrides=large) as omni:
        yield omni


async def read(generations: Generations) -> Counter[int]:
    """Return how many outputs with text each generation has."""
    with trio.fail_after(WATCHDOG_S):
        return Counter([index async for index, output in generations.outputs() if output.delta])


@pytest.mark.parametrize("whole", [True, False])
async def test_reading_many_generations_starts_no_task(omni: OmniSystem, whole: bool) -> None:
    """A task for each generation and output would make the cost quadratic: 64 choices kept the event loop busy.

    Each output of a stream pauses its generation until the connection has accepted it. Here the next output that is
    asked for, most often that of another generation, tells so.
    """
    generations = Generations([omni.generate("hello") for _ in range(16)])
    generations.stream.relay(whole=whole)
    spawned = SpawnedTasks()
    trio.lowlevel.add_instrument(spawned)
    found = await read(generations)
    trio.lowlevel.remove_instrument(spawned)
    assert found == dict.fromkeys(range(16), OUTPUTS)
    assert spawned.count < OUTPUTS


async def test_whole_answers_stay_charged_until_they_are_sent(omni: OmniSystem) -> None:
    generations = Generations([omni.generate("hello") for _ in range(2)])
    generations.stream.relay(whole=True)
    await read(generations)
    assert generations.stream.undelivered_bytes > 2 * OUTPUTS * 5000
    generations.abort()
