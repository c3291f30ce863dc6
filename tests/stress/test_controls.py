"""The rules for pauses, sleep, weights and adapters: each finds a bug that is planted in a system with real workers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from omni_actors import config as configuration
from omni_actors.orchestrator.dispatch import Dispatcher
from omni_actors.orchestrator.request import Request
from omni_actors.stress.run import run_schedule
from omni_actors.stress.schedule import (
    Kill,
    Operation,
    PauseGeneration,
    Schedule,
    Settle,
    Sleep,
    Submit,
    SwitchAdapter,
    UpdateWeights,
    Wait,
)
from omni_actors.stress.workload import Workload
from omni_actors.supervisor.desired_state import DesiredState, Part
from omni_actors.system import OmniSystem
from omni_actors.system.calls import Replies
from omni_actors.system.control import PauseMode
from omni_actors.system.loras import PARAMETER, LoraTable

KILL = (Kill(("second",)), Settle())
STEP_S = 0.07
"""Of the first stage, where a long request must still run when something happens: it takes four seconds, longer than a
busy machine lets a process stand still."""

pytestmark = pytest.mark.slow


def found(workload: Workload, mark: str, *operations: Operation) -> list[str]:
    """Return the violations of a run of these operations alone."""
    return [str(each) for each in run_schedule(workload, Schedule("idle", None, operations), mark).found]


def slowed(workload: Workload) -> Workload:
    """The same workload with steps of ``STEP_S``."""
    slow = configuration.load(workload.pipeline, {"stages.first.options": {"step_s": STEP_S}})
    return replace(workload, pipeline=slow)


def test_a_sound_system_passes_all_of_these(baseline: Workload, mark: str) -> None:
    operations = (
        *(Submit("audio, long"), Wait(20), PauseGeneration("keep", 50), Wait(20), *KILL, PauseGeneration("wait", 100)),
        *(Submit("text, short"), Settle(), Submit("audio, long"), Wait(10), PauseGeneration("abort", 20), Settle()),
        *(Submit("audio, long"), Wait(10), Sleep("second", 20), *KILL, Submit("text, short"), Settle()),
        *(UpdateWeights(), Settle(), *KILL, Submit("audio, long"), UpdateWeights(), *KILL),
    )
    assert found(baseline, mark, *operations) == []


def test_a_request_that_is_answered_during_a_pause_is_found(
    baseline: Workload, mark: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Dispatcher, "keeps_waiting", lambda self, request: False)
    pause = PauseGeneration("wait", 5000)
    (violation,) = found(baseline, mark, pause, Wait(100), Submit("text, short"), Settle())
    assert "was answered while generation was paused" in violation


def test_a_pause_that_aborts_what_it_should_wait_for_is_found(
    baseline: Workload, mark: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pause = OmniSystem.pause_generation

    async def harsh(self: OmniSystem, mode: PauseMode = "abort") -> Replies:
        return await pause(self, "abort")

    monkeypatch.setattr(OmniSystem, "pause_generation", harsh)
    operations = (Submit("audio, long"), Wait(10), PauseGeneration("wait", 10), Settle())
    (violation,) = found(slowed(baseline), mark, *operations)
    assert "the harness did not abort it" in violation


def test_a_worker_that_starts_after_a_pause_and_makes_no_step_is_found(
    baseline: Workload, mark: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    drop = OmniSystem.drop_desired

    def forgetful(self: OmniSystem, capability: str, **terms: Any) -> None:
        if capability != "freeze":
            drop(self, capability, **terms)

    monkeypatch.setattr(OmniSystem, "drop_desired", forgetful)
    impatient = replace(baseline, patience_s=1.5)
    violations = found(impatient, mark, PauseGeneration("keep", 0), Settle(), Kill(("second",)), Settle())
    assert any(each.startswith("hung") for each in violations)


def test_a_stage_that_is_refused_after_it_woke_is_found(
    baseline: Workload, mark: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wake_up = OmniSystem.wake_up

    async def drowsy(self: OmniSystem, *, stages: Collection[str], **terms: Any) -> Replies:
        replies = await wake_up(self, stages=stages, **terms)
        self._orchestrator.closures.asleep.update(stages)
        return replies

    monkeypatch.setattr(OmniSystem, "wake_up", drowsy)
    violations = found(baseline, mark, Sleep("second", 0), Settle())
    assert violations
    assert all("the stage did not sleep" in each for each in violations)


def test_a_worker_that_starts_without_the_new_weights_is_found(
    baseline: Workload, mark: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = DesiredState.parts

    def forgetful(self: DesiredState, stage: str) -> tuple[Part, ...]:
        return tuple(each for each in parts(self, stage) if each.desired.capability != "update_weights")

    monkeypatch.setattr(DesiredState, "parts", forgetful)
    violations = found(baseline, mark, UpdateWeights(), Settle(), *KILL, Submit("audio, short"), Settle())
    assert violations
    assert all("with the weights 0, established were 1" in each for each in violations)


def test_weights_that_change_within_a_request_are_found(
    planted: Callable[[str], Workload], mark: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def hasty(self: OmniSystem, mode: PauseMode = "wait") -> None:
        pass

    monkeypatch.setattr(OmniSystem, "_start", hasty)
    operations = (Submit("audio, long", pace=5), Wait(20), UpdateWeights(), Settle())
    violations = found(slowed(planted("Hasty")), mark, *operations)
    assert any("outputs of 'second' with the weights 0 and 1" in each for each in violations), violations


def test_a_replay_with_the_newest_version_of_its_adapter_is_found(
    baseline: Workload, mark: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolve, post_start, newest = LoraTable.resolve, Dispatcher._post_start, dict[str, Any]()

    def noting(self: LoraTable, by_stage: Mapping[str, dict[str, Any]]) -> None:
        resolve(self, by_stage)
        newest.update({stage: share[PARAMETER] for stage, share in by_stage.items() if share.get(PARAMETER)})

    def with_the_newest(self: Dispatcher, request: Request, stage: str, now: float) -> None:
        params = msgspec.msgpack.decode(request.params[stage])
        if params.get(PARAMETER):
            params[PARAMETER] = newest[stage]
            request.params = {**request.params, stage: msgspec.Raw(msgspec.msgpack.encode(params))}
        post_start(self, request, stage, now)

    monkeypatch.setattr(LoraTable, "resolve", noting)
    monkeypatch.setattr(Dispatcher, "_post_start", with_the_newest)
    operations = (
        *(Submit("text, adapter"), Wait(100), SwitchAdapter(1), Wait(200)),
        *(Submit("text, adapter"), Kill(("first",)), Settle()),
    )
    violations = found(slowed(baseline), mark, *operations)
    assert {each.partition(":")[0] for each in violations} & {"corrupted", "lost"}, violations
