"""The order of control messages when a resumable stage starts again, on simulated workers."""

from __future__ import annotations

import pytest
import trio.testing

from omni_actors.config import Pipeline, Stage
from omni_actors.orchestrator.pieces import Input
from omni_actors.protocol.messages import Address, ControlMessage, JournalPart, Start, Switch, Switched
from omni_actors.stress.simulation.spawner import SimulatedSpawner
from omni_actors.stress.simulation.worker import SimulatedWorker, WorkerBehavior
from omni_actors.system import OmniSystem
from tests.support.simulated_system import read, until

ENGINE = "omni_actors.stress.simulation.deciding:DecidingEngine"


async def test_a_stage_starts_again_when_every_answer_is_there(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, type[ControlMessage]]] = []
    post, notify = SimulatedWorker.post, SimulatedWorker.notify

    def recording_post(
        self: SimulatedWorker, message: ControlMessage, fds: tuple[int, ...] = (), *, wakes: bool = True
    ) -> None:
        if isinstance(message, Switch | JournalPart | Start):
            seen.append((self.address.stage, type(message)))
        post(self, message, fds, wakes=wakes)

    def recording_notify(self: SimulatedWorker, message: ControlMessage, fds: tuple[int, ...] = ()) -> None:
        if isinstance(message, Switched):
            seen.append((self.address.stage, Switched))
        notify(self, message, fds)

    monkeypatch.setattr(SimulatedWorker, "post", recording_post)
    monkeypatch.setattr(SimulatedWorker, "notify", recording_notify)
    stages = {
        "first": Stage(engine=ENGINE, accepts=("script",), emits="text", resumable=True),
        "second": Stage(engine=ENGINE, inputs=("first",), resumable=True),
        "third": Stage(engine=ENGINE, inputs=("second",), emits="audio", resumable=True),
    }
    spawner = SimulatedSpawner(lambda address, pid: WorkerBehavior(turn_s=0.1), lambda line: None)
    async with OmniSystem.open(Pipeline(name="resume", stages=stages), spawner=spawner) as omni:
        pieces = [Input({"text": f"{n} "}) for n in range(20)]
        generation = omni.submit({"script": pieces}, ["text", "audio"])
        await until(lambda: omni.metrics.registry.get_sample_value("omni_unread_bytes") != 0)
        seen.clear()
        spawner.living[Address("first", 0)].kill()
        outputs = await read(generation)
    assert "".join(each.data["text"] for each in outputs if each.stage == "third") == "".join(
        f"{n} " for n in range(20)
    )
    assert set(seen[:2]) == {("second", Switch), ("third", Switch)}
    assert set(seen[2:4]) == {("second", Switched), ("third", Switched)}
    assert seen[4:] == [("first", JournalPart), ("first", Start)]
