"""The order of control messages when a resumable stage starts again, on simulated workers."""

from __future__ import annotations

import pytest
import trio.testing

from omni_actors.config import Pipeline, Stage
from omni_actors.orchestrator.pieces import Input
from omni_actors.outputs import Output
from omni_actors.protocol.messages import Address, ControlMessage, JournalPart, Start, Switch, Switched
from omni_actors.stress.simulation.spawner import SimulatedSpawner
from omni_actors.stress.simulation.worker import SimulatedWorker, WorkerBehavior
from omni_actors.system import OmniSystem
from tests.support.simulated_system import read, until

ENGINE = "omni_actors.stress.simulation.deciding:DecidingEngine"
PIPELINE = Pipeline(
    name="resume",
    stages={
        "first": Stage(engine=ENGINE, accepts=("script",), emits="text", resumable=True),
        "second": Stage(engine=ENGINE, inputs=("first",), resumable=True),
        "third": Stage(engine=ENGINE, inputs=("second",), emits="audio", resumable=True),
    },
)
PIECES = [Input({"text": f"{n} "}) for n in range(20)]
SCRIPT = "".join(f"{n} " for n in range(20))


def spoken(outputs: list[Output]) -> str:
    return "".join(each.data["text"] for each in outputs if each.stage == "third")


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
    spawner = SimulatedSpawner(lambda address, pid: WorkerBehavior(turn_s=0.1), lambda line: None)
    async with OmniSystem.open(PIPELINE, spawner=spawner) as omni:
        generation = omni.submit({"script": PIECES}, ["text", "audio"])
        await until(lambda: omni.metrics.registry.get_sample_value("omni_unread_bytes") != 0)
        seen.clear()
        spawner.living[Address("first", 0)].kill()
        outputs = await read(generation)
    assert spoken(outputs) == SCRIPT
    assert set(seen[:2]) == {("second", Switch), ("third", Switch)}
    assert set(seen[2:4]) == {("second", Switched), ("third", Switched)}
    assert seen[4:] == [("first", JournalPart), ("first", Start)]


@pytest.mark.parametrize("later", [[], ["third"], ["second"], ["third", "second"], ["second", "third"]], ids=str)
@pytest.mark.parametrize("modalities", [["audio"], ["text", "audio"]], ids=str)
async def test_outputs_that_the_only_consumer_has_are_not_computed_again(
    later: list[str], modalities: list[str], autojump_clock: trio.testing.MockClock
) -> None:
    """later: which stages die afterwards, and need these outputs after all."""
    starts: list[Start] = []
    spawner = SimulatedSpawner(lambda address, pid: WorkerBehavior(turn_s=0.1), lambda line: None)
    spawner.on_start = lambda address, message: starts.append(message) if address.stage == "second" else None
    async with OmniSystem.open(PIPELINE, spawner=spawner) as omni:
        generation = omni.submit({"script": PIECES}, modalities)
        outputs = []
        for stage in ["second", *later]:
            async for output in generation:
                outputs.append(output)
                if len(outputs) % 5 == 0 and output.stage == "third":
                    break
            spawner.living[Address(stage, 0)].kill()
            await trio.sleep(0.05)
        outputs += await read(generation)
    assert spoken(outputs) == SCRIPT
    assert starts[0].computed_from == 0
    assert starts[1].computed_from == starts[1].needed_from[0] > 0
    if later[:1] == ["third"]:
        assert starts[2].computed_from == 0, "the third stage starts again, too, and has none of them"
