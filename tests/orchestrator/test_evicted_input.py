"""Live input that is evicted while a stage starts again, on simulated workers in virtual time."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from omni_actors.config import Limits, Pipeline, Stage
from omni_actors.orchestrator.pieces import Input
from omni_actors.orchestrator.replay_state import Phase
from omni_actors.stress.simulation.spawner import SimulatedSpawner
from omni_actors.stress.simulation.worker import WorkerBehavior
from omni_actors.system import OmniSystem
from tests.support.simulated_system import read, until

WATCHDOG_S = 100.0
"""Virtual."""


@pytest.mark.parametrize("deaths", [1, 2])
async def test_a_stage_that_starts_again_is_sent_what_arrives_meanwhile_and_all_before(
    autojump_clock: trio.testing.MockClock, deaths: int
) -> None:
    """More arrives than is retained, while the replica that takes over has not confirmed its start. It may die too."""
    spawner = SimulatedSpawner(lambda address, pid: WorkerBehavior(1.0, 0.1), lambda note: None)
    stage = Stage(engine="echo", accepts=("script",), emits="text", deterministic=True, replicas=3)
    pipeline = Pipeline(name="one", stages={"first": stage}, limits=Limits(retain_bytes=2000))
    texts = [str(number) * 50 for number in range(4)]
    send, segments = trio.open_memory_channel[Input](len(texts))
    async with OmniSystem.open(pipeline, spawner=spawner) as omni:
        generation = omni.submit({"script": segments}, ["text"])
        request = generation.stream.request
        for text in texts[:3]:
            send.send_nowait(Input({"text": text}))
        await until(lambda: len(request.pieces) == 3)
        died = request.replay_state.placement["first"]
        others = [each for each in spawner.living if each != died]
        for each in others:
            spawner.living[each].stop_process()  # it is in a long step
        spawner.living[died].die(signal="SIGKILL")
        await until(lambda: request.replay_state.stages["first"].phase is Phase.RESTARTING)
        send.send_nowait(Input({"text": texts[3]}))
        await until(lambda: request.input.evicting is not None)
        if deaths == 2:
            successor = request.replay_state.placement["first"]
            others.remove(successor)
            spawner.living[successor].die(signal="SIGKILL")
        for each in others:
            spawner.living[each].continue_process()
        send.close()
        with trio.fail_after(WATCHDOG_S):
            assert [output.data["text"] for output in await read(generation) if "text" in output.data] == texts
