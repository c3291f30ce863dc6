"""Deaths with standbys and replicas, on simulated workers in virtual time: many at once, as with a lost GPU host."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import pytest
import trio

from omni_actors.config import Pipeline, Stage
from omni_actors.errors import InvalidRequest, StageCrashed, TemporarilyRefused
from omni_actors.log_events import RequestsLost
from omni_actors.orchestrator.pieces import Input
from omni_actors.stages.base import StageContext, StageRequest
from omni_actors.stress.simulation.deciding import DecidingEngine
from omni_actors.stress.simulation.spawner import SimulatedSpawner
from omni_actors.stress.simulation.worker import SimulatedWorker, WorkerBehavior
from omni_actors.system import OmniSystem
from tests.support.echo_systems import OFTEN

STAGES = ("first", "second", "third")
PIECES = 30
DECIDING: dict[str, Any] = {"engine": "omni_actors.stress.simulation.deciding:DecidingEngine", "resumable": True}
"""Fields of a stage whose engine decides."""
WATCHDOG_S = 1000.0
"""Virtual."""


def pipeline(**each: Any) -> Pipeline:
    """Three stages with the default limits. each: fields of every stage, in place of those below."""
    stages = {
        name: Stage(
            **({"inputs": (before,)} if before else {"accepts": ("script",)}),
            emits="audio" if name == STAGES[-1] else None,
            **{"engine": "echo", "restart": OFTEN, **each},
        )
        for before, name in zip(("", *STAGES), STAGES, strict=False)
    }
    return Pipeline(name="deaths", stages=stages)


async def check_answers(
    each: dict[str, Any], deaths: Sequence[str], delay_s: float, turns_s: Mapping[str, float] | None = None
) -> list[BaseException | None]:
    """Kill all workers that serve these stages when an answer has begun. Returns how each request ended.

    No other worker may die. delay_s: between two deaths. turns_s: of stages whose turns take longer.
    """
    turns = defaultdict(lambda: 0.01, turns_s or {})
    spawner = SimulatedSpawner(
        lambda address, pid: WorkerBehavior(load_s=1.0, turn_s=turns[address.stage]), lambda note: None
    )
    ends: list[BaseException | None] = []

    async def ask(has_begun: trio.Event) -> None:
        inputs = {"script": [Input({"n": i, "text": "."}) for i in range(PIECES)]}
        outputs = []
        try:
            async for output in omni.submit(inputs, ["audio"]):
                has_begun.set()
                outputs.append(output.data["n"])
        except StageCrashed as error:
            ends.append(error)
        else:
            assert outputs == list(range(PIECES))
            ends.append(None)

    with trio.fail_after(WATCHDOG_S):
        async with OmniSystem.open(pipeline(**each), spawner=spawner) as omni:
            async with trio.open_nursery() as nursery:
                has_begun = [trio.Event() for _ in range(4)]
                for event in has_begun:
                    nursery.start_soon(ask, event)
                for event in has_begun:
                    await event.wait()
                victims = [worker for stage in deaths for worker in serving(omni, spawner, stage)]
                for victim in victims:
                    victim.kill()
                    await trio.sleep(delay_s)
            assert {worker.pid for worker in spawner.workers if not worker.alive} <= {each.pid for each in victims}
    return ends


def serving(omni: OmniSystem, spawner: SimulatedSpawner, stage: str) -> list[SimulatedWorker]:
    pids = {each.pid for each in omni.health().stages[stage] if not each.standby}
    return [worker for worker in spawner.workers if worker.pid in pids]


@pytest.mark.parametrize("each", [{}, {"standby": 1}, {"replicas": 2}, {"replicas": 2, "standby": 1}], ids=str)
@pytest.mark.parametrize("deaths", [STAGES, STAGES[::-1]], ids=["first to last", "last to first"])
@pytest.mark.parametrize("delay_s", [0.0, 0.005])
async def test_requests_survive_the_death_of_every_stage_at_once(
    each: dict[str, Any], deaths: Sequence[str], delay_s: float, autojump_clock: trio.testing.MockClock
) -> None:
    assert await check_answers(each, deaths, delay_s) == [None] * 4


@pytest.mark.parametrize("each", [{}, {"standby": 1}, {"replicas": 2}], ids=str)
@pytest.mark.parametrize("deaths", [STAGES[1:], STAGES[:0:-1]], ids=["source first", "consumer first"])
@pytest.mark.parametrize("delay_s", [0.0, 0.05, 0.1, 0.15, 0.3, 0.6])
@pytest.mark.parametrize("slow", STAGES[1:])
async def test_requests_are_resumed_when_a_stage_and_its_source_die_shortly_after_each_other(
    each: dict[str, Any], deaths: Sequence[str], delay_s: float, slow: str, autojump_clock: trio.testing.MockClock
) -> None:
    assert await check_answers({**DECIDING, **each}, deaths, delay_s, {slow: 0.2}) == [None] * 4


@pytest.mark.parametrize("delay_s", [0.0, 0.005])
async def test_requests_survive_the_death_of_all_replicas_of_a_stage_but_the_last_one(
    delay_s: float, autojump_clock: trio.testing.MockClock
) -> None:
    assert await check_answers({"replicas": 4, "standby": 1}, ["second"], delay_s) == [None] * 4


def generations(omni: OmniSystem) -> list[int]:
    return [each.generation for replicas in omni.health().stages.values() for each in replicas]


@pytest.mark.parametrize("strategy", ["one_for_all", "rest_for_one"])
async def test_the_death_of_a_standby_restarts_no_worker_that_serves(
    strategy: Any, autojump_clock: trio.testing.MockClock
) -> None:
    behaviors = defaultdict[int, WorkerBehavior](lambda: WorkerBehavior(load_s=1.0, turn_s=0.01))
    spawner = SimulatedSpawner(lambda address, pid: behaviors[pid], lambda note: None)
    each = {"standby": 1, "restart": msgspec.structs.replace(OFTEN, strategy=strategy)}
    with trio.fail_after(WATCHDOG_S):
        async with OmniSystem.open(pipeline(**each), spawner=spawner) as omni:
            await trio.sleep(10)
            before = generations(omni)
            standby = next(each for each in omni.health().stages["first"] if each.standby)
            next_pid = max(worker.pid for worker in spawner.workers) + 1
            behaviors[next_pid] = WorkerBehavior(fails="there is no memory for another copy")
            next(worker for worker in spawner.workers if worker.pid == standby.pid).kill()
            await trio.sleep(60)  # its first restart fails, and the second one succeeds
            after = generations(omni)
            assert [new - old for old, new in zip(before, after, strict=True)] == [
                2 if number == standby.replica else 0 for number in range(len(before))
            ]
            serving(omni, spawner, "first")[0].kill()
            await trio.sleep(60)
            assert all(new > old for old, new in zip(after[2:], generations(omni)[2:], strict=True))


async def test_a_request_whose_workers_are_killed_one_after_the_other_uses_up_its_replays(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """Each is killed as soon as it is ready, before it has started the request again."""
    spawner = SimulatedSpawner(lambda address, pid: WorkerBehavior(load_s=1.0, turn_s=0.01), lambda note: None)
    with trio.fail_after(WATCHDOG_S):
        async with OmniSystem.open(pipeline(), spawner=spawner) as omni:
            generation = omni.submit({"script": [Input({"n": i}) for i in range(10 * PIECES)]}, ["audio"])
            await anext(aiter(generation))
            for _ in range(3):
                while (
                    not (alive := serving(omni, spawner, "third")) or omni.health().stages["third"][0].state != "ready"
                ):
                    await omni.wait_changed()
                alive[0].kill()
                await omni.wait_changed()
            with pytest.raises(StageCrashed, match="it was replayed 2 times already"):
                async for _ in generation:
                    pass


class RefusesReplays(DecidingEngine):
    """Refuses each request that an earlier incarnation of the second stage had started."""

    def __init__(self, context: StageContext) -> None:
        super().__init__(context)
        self._refuses = context.stage == "second"

    def start(self, request: StageRequest) -> None:
        if self._refuses and request.replayed:
            raise TemporarilyRefused("it cannot go on", code="not_resumed")
        super().start(request)


async def test_a_request_that_has_gone_on_and_is_refused_later_is_not_logged_as_lost(
    caplog: pytest.LogCaptureFixture, autojump_clock: trio.testing.MockClock
) -> None:
    spawner = SimulatedSpawner(lambda address, pid: WorkerBehavior(load_s=1.0, turn_s=0.01), lambda note: None)
    pieces = [Input({"n": i, "text": "."}) for i in range(PIECES)]
    pieces.append(Input({"n": PIECES, "text": ".", "echo": {"stage": "second", "invalid": "feed"}}))
    with trio.fail_after(WATCHDOG_S):
        async with OmniSystem.open(pipeline(**DECIDING), spawner=spawner) as omni:
            send, live = trio.open_memory_channel[Input](0)
            generation = omni.submit({"script": live}, ["audio"])
            outputs = aiter(generation)
            for each in pieces[: PIECES // 2]:
                await send.send(each)
                await anext(outputs)
            serving(omni, spawner, "second")[0].kill()
            for each in pieces[PIECES // 2 : -1]:
                await send.send(each)
                await anext(outputs)
            await send.send(pieces[-1])
            with pytest.raises(InvalidRequest):
                await anext(outputs)
            await trio.sleep(1)
    events = [getattr(record, "event", None) for record in caplog.records]
    assert not any(isinstance(event, RequestsLost) for event in events)


@pytest.mark.parametrize(
    ("deaths", "signal", "requests"),
    [
        (["second"], "SIGKILL", 1),
        pytest.param(["second", "third"], "SIGKILL", 1, id="another stage dies later"),
        pytest.param(["second"], "SIGSEGV", 2, id="either request may be to blame"),
    ],
)
async def test_requests_that_are_refused_when_they_are_replayed_are_logged_as_lost(
    deaths: Sequence[str],
    signal: str,
    requests: int,
    caplog: pytest.LogCaptureFixture,
    autojump_clock: trio.testing.MockClock,
) -> None:
    spawner = SimulatedSpawner(lambda address, pid: WorkerBehavior(load_s=1.0, turn_s=0.01), lambda note: None)
    each = {**DECIDING, "engine": f"{__name__}:RefusesReplays"}
    scripts = [[Input({"n": i, "text": f"{number}."}) for i in range(PIECES)] for number in range(requests)]
    with trio.fail_after(WATCHDOG_S):
        async with OmniSystem.open(pipeline(**each), spawner=spawner) as omni:
            running = [omni.submit({"script": script}, ["audio"]) for script in scripts]
            for generation in running:
                await anext(aiter(generation))
            for victim in [worker for stage in deaths for worker in serving(omni, spawner, stage)]:
                victim.die(signal=signal)
                await trio.sleep(0.01)
            for generation in running:
                with pytest.raises(TemporarilyRefused):
                    async for _ in generation:
                        pass
            await trio.sleep(1)
    lost = [record.event for record in caplog.records if isinstance(getattr(record, "event", None), RequestsLost)]
    assert {(each.stage, each.retryable) for each in lost} == {("second", True)}
    assert sum(each.requests for each in lost) == requests
    assert {each.reason for each in lost} == {"it was refused when it was replayed (not_resumed)"}


async def test_what_a_worker_computes_while_it_stops_reaches_the_client(autojump_clock: trio.testing.MockClock) -> None:
    """Two requests wait in two stopped workers. One is told to stop for good, and goes on with what it has first."""
    spawner = SimulatedSpawner(lambda address, pid: WorkerBehavior(turn_s=0.01), lambda note: None)
    with trio.fail_after(WATCHDOG_S):
        async with OmniSystem.open(pipeline(replicas=2), spawner=spawner) as omni:
            workers = serving(omni, spawner, "third")
            for worker in workers:
                worker.stop_process()
            inputs = {"script": [Input({"n": 0, "text": "."})]}
            running = [omni.submit(inputs, ["audio"], on_failure="fail") for _ in workers]
            await trio.sleep(1)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(functools.partial(omni.scale, "third", 1, drain_s=0))
                await trio.sleep(1)
                for worker in workers:
                    worker.continue_process()
            assert sorted(worker.alive for worker in workers) == [False, True]
            for each in running:
                assert [output.data["n"] async for output in each] == [0]


async def test_input_that_waits_for_a_dying_worker_goes_to_the_standby(autojump_clock: trio.testing.MockClock) -> None:
    """The ring of the dead worker is full, and its process takes long to be torn down."""
    spawner = SimulatedSpawner(lambda address, pid: WorkerBehavior(turn_s=0.01, dying_s=100.0), lambda note: None)
    with trio.fail_after(WATCHDOG_S):
        async with OmniSystem.open(pipeline(standby=1, ring_bytes=8192), spawner=spawner) as omni:
            [worker] = serving(omni, spawner, "first")
            worker.stop_process()
            generation = omni.submit(
                {"script": [Input({"n": i, "text": "." * 1000}) for i in range(PIECES)]}, ["audio"]
            )
            await trio.sleep(1)
            worker.kill()
            killed_at = trio.current_time()
            assert [output.data["n"] async for output in generation] == list(range(PIECES))
            assert trio.current_time() - killed_at < worker.behavior.dying_s
