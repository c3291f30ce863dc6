"""Suspects that are found innocent without a trial, on simulated workers in virtual time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, ClassVar

import trio
import trio.testing
from msgspec.structs import replace

from omni_actors.config import Pipeline, Restart, Stage
from omni_actors.errors import RequestError, WorkerExit
from omni_actors.generation import Generation
from omni_actors.orchestrator.pieces import Input
from omni_actors.orchestrator.trials import CULPRIT_WAIT_S, LONGEST_PROBATION_S, REPLICA_DRAIN_S, STAGE_QUIET_S
from omni_actors.protocol.messages import Address
from omni_actors.stages.base import Chunk, StageCheckpoint, StageFailure, StageOutput
from omni_actors.stages.echo.engine import EchoEngine
from omni_actors.stress.simulation.fault_points import PlannedKill
from omni_actors.stress.simulation.spawner import SimulatedSpawner
from omni_actors.stress.simulation.worker import WorkerBehavior
from omni_actors.system import OmniSystem
from tests.support.simulated_system import read, until

FIRST, SECOND = Address("first", 0), Address("second", 0)


class Crashes(EchoEngine):
    """An engine whose worker crashes at the output of a request with ``poison``."""

    crash: ClassVar[Callable[[], None]]

    def step(self) -> Iterator[StageOutput | StageFailure | StageCheckpoint]:
        for output in super().step():
            if isinstance(output, StageOutput) and "poison" in output.data:
                Crashes.crash()
                raise PlannedKill
            yield output


class Holds(EchoEngine):
    """An engine that does not answer a request with ``hold``."""

    def feed(self, request_id: int, chunk: Chunk) -> None:
        if "hold" not in chunk.data:
            super().feed(request_id, chunk)


def two_stages(first: str, second: str) -> Pipeline:
    """Return a pipeline of these engines, whose workers are restarted at once."""
    echo: dict[str, Any] = {
        "deterministic": True,
        "restart": Restart(intensity=9, backoff_s=0.01, backoff_max_s=0.01),
    }
    stages = {
        "first": Stage(engine=first, accepts=("script",), emits="text", **echo),
        "second": Stage(engine=second, inputs=("first",), emits="audio", **echo),
    }
    return Pipeline(name="two", stages=stages)


async def test_a_suspect_that_its_stage_had_finished_delays_no_other_suspect(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """The worker crashes in a step in which it has sent the last chunk of another request, and not reported that."""
    spawner = SimulatedSpawner(lambda address, pid: WorkerBehavior(1.0, 0.1), lambda note: None)
    Crashes.crash = lambda: spawner.living[FIRST].die(signal="SIGSEGV")
    async with OmniSystem.open(two_stages(f"{__name__}:Crashes", f"{__name__}:Holds"), spawner=spawner) as omni:

        def submit(**data: str) -> Generation:
            return omni.submit({"script": [Input(data)]}, ["audio"])

        spawner.living[SECOND].stop_process()
        held, poison, innocent = submit(hold="yes"), submit(poison="yes"), submit(text="innocent")
        await until(lambda: omni.health().stages["first"][0].restarts == 1)
        spawner.living[SECOND].continue_process()
        with trio.fail_after(60.0):
            assert [output.data["text"] for output in await read(innocent)] == ["innocent"]
        held.abort()
        poison.abort()


async def test_a_worker_whose_weights_are_taken_back_makes_no_suspects(
    autojump_clock: trio.testing.MockClock,
) -> None:
    spawner = SimulatedSpawner(lambda address, pid: WorkerBehavior(1.0, 0.1), lambda note: None)
    async with OmniSystem.open(two_stages(f"{__name__}:Holds", "echo"), spawner=spawner) as omni:
        held = omni.submit({"script": [Input({"hold": "yes"})]}, ["text"])
        await until(lambda: held.stream.request.number is not None)
        omni._supervisor.replicas[FIRST].kill("another replica has refused its new weights", took_back=True)
        await until(lambda: omni.health().stages["first"][0].restarts == 1)
        deaths = held.stream.request.deaths
        assert (len(deaths.losses), deaths.suspected, deaths.to_charge) == (1, 0, set())
        held.abort()
        again = omni.submit({"script": [Input({"hold": "yes"})]}, ["text"])
        assert again.stream.request.deaths.suspected == 0, "its fingerprint is not remembered as a culprit's"
        again.abort()


class CrashesOnce(Crashes):
    """An engine whose worker crashes at the first output of a request with ``poison``, and never again."""

    has_crashed = False

    def step(self) -> Iterator[StageOutput | StageFailure | StageCheckpoint]:
        if CrashesOnce.has_crashed:
            yield from EchoEngine.step(self)
        else:
            CrashesOnce.has_crashed = any("poison" in each.head.data for each in self._requests.values() if each.head)
            yield from super().step()


async def test_a_replica_is_drained_no_longer_than_it_may_although_another_stage_is_away(
    autojump_clock: trio.testing.MockClock,
) -> None:
    loads_s = {FIRST: 1.0, SECOND: 1.0}
    spawner = SimulatedSpawner(lambda address, pid: WorkerBehavior(loads_s[address], 0.1), lambda note: None)
    Crashes.crash = lambda: spawner.living[FIRST].die(signal="SIGSEGV")
    async with OmniSystem.open(two_stages(f"{__name__}:CrashesOnce", "echo"), spawner=spawner) as omni:
        loads_s[SECOND] = 500.0
        poison = omni.submit({"script": [Input({"poison": "yes"})]}, ["audio"])
        await until(lambda: omni.health().stages["first"][0].restarts == 1)
        spawner.living[SECOND].kill()
        delays = []
        while trio.current_time() < CULPRIT_WAIT_S + 2 * REPLICA_DRAIN_S:
            began = trio.current_time()
            await read(omni.submit({"script": [Input({"text": str(began)})]}, ["text"]))
            delays.append(trio.current_time() - began)
        assert REPLICA_DRAIN_S - 1.0 < max(delays) < REPLICA_DRAIN_S + 1.0
        poison.abort()


class CrashesOnceAndHolds(CrashesOnce, Holds):
    """Both."""


async def test_a_suspect_is_tried_when_the_last_other_request_is_aborted(
    autojump_clock: trio.testing.MockClock,
) -> None:
    spawner = SimulatedSpawner(lambda address, pid: WorkerBehavior(1.0, 0.1), lambda note: None)
    Crashes.crash = lambda: spawner.living[FIRST].die(signal="SIGSEGV")
    CrashesOnce.has_crashed = False
    async with OmniSystem.open(two_stages(f"{__name__}:CrashesOnceAndHolds", "echo"), spawner=spawner) as omni:
        poison = omni.submit({"script": [Input({"poison": "yes"})]}, ["text"])
        await until(lambda: omni.health().stages["first"][0].restarts == 1)
        hold = omni.submit({"script": [Input({"hold": "yes"})]}, ["text"])
        await until(lambda: hold.stream.request.number is not None)
        await trio.sleep(2 * STAGE_QUIET_S)
        hold.abort()
        with trio.fail_after(CULPRIT_WAIT_S / 2):
            await read(poison)


async def test_a_probation_that_passes_while_generation_is_paused_clears_nothing(
    autojump_clock: trio.testing.MockClock,
) -> None:
    spawner = SimulatedSpawner(lambda address, pid: WorkerBehavior(1.0, 0.1), lambda note: None)
    Crashes.crash = lambda: spawner.living[FIRST].die(signal="SIGSEGV")
    async with OmniSystem.open(two_stages(f"{__name__}:Crashes", "echo"), spawner=spawner) as omni:
        poison = omni.submit({"script": [Input({"poison": "yes"})]}, ["text"])
        await until(lambda: omni.health().stages["first"][0].restarts == 1)
        trials = omni._orchestrator._dispatcher.trials
        await omni.pause_generation("keep")
        await until(lambda: bool(trials.running))
        await trio.sleep(2 * LONGEST_PROBATION_S)
        assert poison.stream.request in trials.group_of
        await omni.resume_generation()
        [group] = trials.groups
        assert group.ends_at > trio.current_time()
        poison.abort()


class CrashesAndHolds(Crashes, Holds):
    """Both."""


async def test_no_wait_of_a_suspect_passes_while_generation_is_paused(autojump_clock: trio.testing.MockClock) -> None:
    """A culprit that is not tried in time is ended. Afterwards, what was left of the wait goes on."""
    spawner = SimulatedSpawner(lambda address, pid: WorkerBehavior(1.0, 0.1), lambda note: None)
    Crashes.crash = lambda: spawner.living[FIRST].die(signal="SIGSEGV")
    async with OmniSystem.open(two_stages(f"{__name__}:CrashesAndHolds", "echo"), spawner=spawner) as omni:
        poison = omni.submit({"script": [Input({"poison": "yes"})]}, ["text"])
        await until(lambda: omni.health().stages["first"][0].restarts == 2)
        hold = omni.submit({"script": [Input({"hold": "yes"})]}, ["text"])
        await until(lambda: hold.stream.request.number is not None)
        await trio.sleep(CULPRIT_WAIT_S / 2)
        await omni.pause_generation("keep")
        await trio.sleep(2 * CULPRIT_WAIT_S)
        assert not poison.stream.request.lifecycle.ended
        await omni.resume_generation()
        await trio.sleep(CULPRIT_WAIT_S / 4)
        assert not poison.stream.request.lifecycle.ended
        await trio.sleep(CULPRIT_WAIT_S / 2)
        assert poison.stream.request.lifecycle.ended
        hold.abort()


async def test_a_replica_is_drained_on_after_a_pause(autojump_clock: trio.testing.MockClock) -> None:
    spawner = SimulatedSpawner(lambda address, pid: WorkerBehavior(1.0, 0.1), lambda note: None)
    Crashes.crash = lambda: spawner.living[FIRST].die(signal="SIGSEGV")
    async with OmniSystem.open(two_stages(f"{__name__}:CrashesAndHolds", "echo"), spawner=spawner) as omni:
        poison = omni.submit({"script": [Input({"poison": "yes"})]}, ["text"])
        await until(lambda: omni.health().stages["first"][0].restarts == 1)
        hold = omni.submit({"script": [Input({"hold": "yes"})]}, ["text"])
        trials = omni._orchestrator._dispatcher.trials
        await until(lambda: trials.draining("first") is not None)
        await trio.sleep(REPLICA_DRAIN_S / 2)
        await omni.pause_generation("keep")
        await trio.sleep(2 * REPLICA_DRAIN_S)
        await omni.resume_generation()
        await trio.sleep(REPLICA_DRAIN_S / 4)
        assert trials.draining("first") is not None
        await trio.sleep(REPLICA_DRAIN_S / 2)
        assert trials.draining("first") is None
        hold.abort()
        poison.abort()


async def test_a_stage_becomes_quiet_for_a_suspect_only_while_it_works(autojump_clock: trio.testing.MockClock) -> None:
    spawner = SimulatedSpawner(lambda address, pid: WorkerBehavior(1.0, 0.1), lambda note: None)
    Crashes.crash = lambda: spawner.living[FIRST].die(signal="SIGSEGV")
    async with OmniSystem.open(two_stages(f"{__name__}:CrashesAndHolds", "echo"), spawner=spawner) as omni:
        poison = omni.submit({"script": [Input({"poison": "yes"})]}, ["text"])
        await until(lambda: omni.health().stages["first"][0].restarts == 1)
        await read(omni.submit({"script": [Input({"text": "other"})]}, ["text"]))
        trials = omni._orchestrator._dispatcher.trials
        await omni.pause_generation("keep")
        await trio.sleep(2 * STAGE_QUIET_S)
        await omni.resume_generation()
        await trio.sleep(STAGE_QUIET_S / 2)
        assert not trials.running
        await trio.sleep(STAGE_QUIET_S)
        assert trials.running or omni.health().stages["first"][0].restarts == 2
        poison.abort()


def quick_workers() -> tuple[SimulatedSpawner, dict[str, float]]:
    """Return a spawner of quick workers, and how long those of each stage load."""
    loads_s = {"first": 0.1, "second": 0.1}
    return SimulatedSpawner(
        lambda address, pid: WorkerBehavior(loads_s[address.stage], 0.01), lambda note: None
    ), loads_s


def long_request(omni: OmniSystem, name: str, *, pieces: int = 3000, fails_at: int = -1) -> Generation:
    """Submit a request of many outputs. The second stage's engine raises at the one with number ``fails_at``.

    Requests that fail at the same one are equal.
    """
    parts = [Input({"piece": number, "of": "x" if fails_at >= 0 else name}) for number in range(pieces)]
    if fails_at >= 0:
        parts[fails_at] = Input({"echo": {"stage": "second", "raise": "feed"}})
    return omni.submit({"script": parts}, ["audio"], deadline_s=3000, request_id=name)


async def discard(generation: Generation) -> None:
    with suppress(RequestError):
        async for _ in generation:
            pass


async def test_a_replica_that_a_suspect_leaves_takes_the_requests_that_wait_for_it(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """The suspect of one stage becomes that of another one during its trial."""
    spawner, loads_s = quick_workers()
    async with OmniSystem.open(two_stages("echo", "echo"), spawner=spawner) as omni, trio.open_nursery() as nursery:
        trials = omni._orchestrator._dispatcher.trials
        nursery.start_soon(discard, long_request(omni, "suspect", pieces=20_000))
        await trio.sleep(1)
        spawner.living[FIRST].die(exit_code=1)
        await until(lambda: FIRST in trials.running and bool(trials.running[FIRST].on_trial))
        waiting = omni.submit({"script": [Input({"text": "x"})]}, ["text"], deadline_s=2000)
        loads_s["second"] = 300.0
        await trio.sleep(0.2)
        assert waiting.stream.request.number is None
        spawner.living[SECOND].die(exit_code=1)
        with trio.fail_after(10.0):
            assert [output.data["text"] for output in await read(waiting)] == ["x"]
        nursery.cancel_scope.cancel()


def good_ones_at_deaths_of_second(omni: OmniSystem) -> list[set[str]]:
    """Return a list that gets the names of the other requests with which the second stage's worker dies each time."""
    suspects, dispatcher = omni._orchestrator._suspects, omni._orchestrator._dispatcher
    find, found = suspects.worker_died, list[set[str]]()

    def noted(address: Address, exit: WorkerExit, failed: int | None) -> bool:
        if address == SECOND:
            held = [each for each in dispatcher.running() if each.replay_state.is_held_by(SECOND)]
            found.append({each.name for each in held if "second" not in each.stats and "good" in each.name})
        return find(address, exit, failed)

    suspects.worker_died = noted  # type: ignore[method-assign]
    return found


async def test_a_culprit_that_was_tried_with_others_in_another_stage_runs_alone(
    autojump_clock: trio.testing.MockClock,
) -> None:
    spawner, _ = quick_workers()
    async with OmniSystem.open(two_stages("echo", "echo"), spawner=spawner) as omni, trio.open_nursery() as nursery:
        beside = good_ones_at_deaths_of_second(omni)
        nursery.start_soon(discard, long_request(omni, "bad", fails_at=60))
        for number in range(3):
            nursery.start_soon(discard, long_request(omni, f"good {number}"))
        await trio.sleep(0.3)
        spawner.living[FIRST].die(exit_code=1)
        await trio.sleep(CULPRIT_WAIT_S + REPLICA_DRAIN_S)
        assert len(beside) >= 1
        assert not any(beside[1:]), "only its first death may harm others"
        nursery.cancel_scope.cancel()


async def test_requests_that_wait_for_the_trial_of_an_equal_one_follow_it_to_another_stage(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """The suspect of the first stage becomes the culprit of the second one. Those that are like it run alone, too."""
    spawner, _ = quick_workers()
    async with OmniSystem.open(two_stages("echo", "echo"), spawner=spawner) as omni, trio.open_nursery() as nursery:
        trials, beside = omni._orchestrator._dispatcher.trials, good_ones_at_deaths_of_second(omni)
        nursery.start_soon(discard, long_request(omni, "bad", fails_at=60))
        await trio.sleep(0.3)
        spawner.living[FIRST].die(exit_code=1)
        await until(lambda: bool(trials))
        for number in range(2):
            nursery.start_soon(discard, long_request(omni, f"bad {number}", fails_at=60))
        await until(lambda: bool(beside))
        for number in range(3):
            nursery.start_soon(discard, long_request(omni, f"good {number}"))
        await trio.sleep(CULPRIT_WAIT_S + REPLICA_DRAIN_S)
        assert not any(beside), "they harm others"
        nursery.cancel_scope.cancel()


async def test_a_request_that_waits_for_another_stage_does_not_wait_for_the_trial_of_an_equal_one(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """The suspect leaves before its trial; its stage has finished the other request, so that would not be tried."""
    spawner, loads_s = quick_workers()
    pipeline = two_stages("echo", f"{__name__}:Holds")
    stages = pipeline.stages | {"first": replace(pipeline.stages["first"], replicas=2)}
    async with OmniSystem.open(replace(pipeline, stages=stages), spawner=spawner) as omni:
        trials = omni._orchestrator._dispatcher.trials

        def submit() -> Generation:
            return omni.submit({"script": [Input({"hold": "yes"})]}, ["audio"], deadline_s=3000)

        finished = submit()
        state = finished.stream.request.replay_state
        await until(lambda: "first" in finished.stream.request.stats)
        other = next(address for address in (FIRST, Address("first", 1)) if not state.is_held_by(address))
        spawner.living[other].stop_process()
        suspect = submit()
        assert suspect.stream.request.replay_state.is_held_by(other)
        loads_s["second"] = 10.0
        spawner.living[SECOND].die(signal="SIGKILL")
        await until(lambda: state.waiting == ("second",))
        spawner.living[other].die(exit_code=1)
        await until(lambda: suspect.stream.request in trials.group_of)
        await until(lambda: SECOND in spawner.living and spawner.living[SECOND].alive)
        spawner.living[SECOND].die(exit_code=1)
        await until(lambda: omni.health().stages["second"][0].restarts == 2)
        suspect.abort()
        with trio.fail_after(60.0):
            await until(lambda: not state.waiting)
        finished.abort()
