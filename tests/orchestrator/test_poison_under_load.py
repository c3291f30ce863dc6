"""The cost of one poison request to a steady load of others, on simulated workers in virtual time."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import pytest
import trio
import trio.testing

from omni_actors.config import Limits, Pipeline, Restart, Stage
from omni_actors.errors import DeadlineExceeded, Quarantined, StageCrashed
from omni_actors.generation import Generation
from omni_actors.orchestrator import request
from omni_actors.orchestrator.pieces import Input
from omni_actors.orchestrator.trials import CULPRIT_WAIT_S, PROBATION_S, REPLICA_DRAIN_S
from omni_actors.protocol.messages import Address
from omni_actors.stages.base import Chunk
from omni_actors.stages.echo.engine import EchoEngine
from omni_actors.stress.simulation.spawner import SimulatedSpawner
from omni_actors.stress.simulation.worker import WorkerBehavior
from omni_actors.system import OmniSystem
from tests.support.simulated_system import PIECES, numbers, open_simulated_system, read, until

LOAD_S, TURN_S, POISON_AFTER_S = 5.0, 0.1, 8.0


@dataclass
class Traffic:
    """Clients of a stage, and the outcomes of their requests. Times are virtual."""

    omni: OmniSystem
    pieces: int
    poison: dict[str, Any]
    until_s: float
    submitted: int = 0
    delays: list[float] = field(default_factory=list)
    deaths: list[float] = field(default_factory=list)
    shared_deaths: set[float] = field(default_factory=set)
    """Times of the deaths of workers that innocent requests were running on."""
    errors: list[Exception] = field(default_factory=list)
    """The errors of the poison requests."""
    completed: list[float] = field(default_factory=list)
    """When poison requests completed."""

    async def watch_deaths(self) -> None:
        known = 0
        while True:
            restarts = sum(each.restarts for each in self.omni.health().stages["only"])
            self.deaths += [trio.current_time()] * (restarts - known)
            known = restarts
            await self.omni.wait_changed()

    async def send_innocent(self, number: int) -> None:
        submitted, self.submitted = trio.current_time(), self.submitted + 1
        pieces = [Input({"n": number, "piece": piece}) for piece in range(self.pieces)]
        try:
            outputs = [output async for output in self.omni.submit({"script": pieces}, ["text"])]
        except StageCrashed:
            assert not self.omni.pipeline.limits.replays
            outputs = []
            await trio.sleep(LOAD_S + 1.0)  # by then the restart is counted
        else:
            assert [output.data["piece"] for output in outputs] == list(range(self.pieces))
            self.delays.append(trio.current_time() - submitted)
        if not outputs or (outputs[-1].metrics is not None and outputs[-1].metrics.replays):
            self.shared_deaths.add(min(death for death in self.deaths if death >= submitted))

    async def send_innocents(self, interval_s: float) -> None:
        async with trio.open_nursery() as nursery:
            number = 0
            while trio.current_time() < self.until_s:
                nursery.start_soon(self.send_innocent, number)
                number += 1
                await trio.sleep(interval_s)

    async def send_poison(self, **how: Any) -> None:
        """Send the same request again as soon as it has failed, until it succeeds."""
        while trio.current_time() < self.until_s:
            try:
                await self._read(self.omni.submit({"script": [Input({"echo": self.poison})]}, ["text"], **how))
                self.completed.append(trio.current_time())
                return
            except (StageCrashed, Quarantined, DeadlineExceeded) as error:
                self.errors.append(error)
            await trio.sleep(1.0)

    async def _read(self, generation: Generation) -> None:
        async for _ in generation:
            pass


class FailsOnce(EchoEngine):
    """An engine that raises for the first chunk that asks for it, and never again."""

    has_failed = False

    def feed(self, request_id: int, chunk: Chunk) -> None:
        if "stderr" in chunk.data.get("echo", {}) and not FailsOnce.has_failed:
            FailsOnce.has_failed = True
            raise RuntimeError("once")
        super().feed(request_id, chunk)


async def run_traffic(
    poison: dict[str, Any],
    *,
    engine: str = "echo",
    replicas: int = 1,
    replays: int = 2,
    pieces: int = 4,
    interval_s: float = 0.5,
    clients_with_poison: int = 3,
    seconds: float = 120.0,
    load_s: float = LOAD_S,
    **how: Any,
) -> Traffic:
    """Send innocent requests without a pause, while some clients repeat one poison request."""
    quick = Restart(intensity=1, period_s=1000.0, backoff_s=0.01, backoff_max_s=0.01, retry_s=0)
    stage = Stage(
        engine=engine,
        deterministic=True,
        accepts=("script",),
        emits="text",
        replicas=replicas,
        options={"spin": True},
        restart=quick,
    )
    limits = Limits(max_requests=1000, replays=replays)
    spawner = SimulatedSpawner(lambda address, pid: WorkerBehavior(load_s, TURN_S), lambda note: None)
    pipeline = Pipeline(name="loaded", stages={"only": stage}, limits=limits)
    async with OmniSystem.open(pipeline, spawner=spawner) as omni, trio.open_nursery() as nursery:
        traffic = Traffic(omni, pieces, poison, trio.current_time() + seconds)
        nursery.start_soon(traffic.watch_deaths)
        async with trio.open_nursery() as clients:
            clients.start_soon(traffic.send_innocents, interval_s)
            await trio.sleep(POISON_AFTER_S)
            for _ in range(clients_with_poison):
                clients.start_soon(lambda: traffic.send_poison(**how))
        nursery.cancel_scope.cancel()
    assert not replays or len(traffic.delays) == traffic.submitted, "no innocent request fails"
    return traffic


def check_bounds(traffic: Traffic) -> None:
    assert len(traffic.shared_deaths) <= 1
    assert len(traffic.deaths) <= 2
    assert max(traffic.delays) < 1.0 + REPLICA_DRAIN_S + PROBATION_S + LOAD_S, "no request waits for two worker loads"
    assert any(isinstance(error, Quarantined) for error in traffic.errors)


@pytest.mark.parametrize("replicas", [1, 2])
async def test_under_steady_load_innocents_share_one_death_with_poison(
    autojump_clock: trio.testing.MockClock, replicas: int
) -> None:
    check_bounds(await run_traffic({"raise": "feed"}, replicas=replicas))


@pytest.mark.slow
async def test_hundreds_of_equal_requests_end_together(autojump_clock: trio.testing.MockClock) -> None:
    """Ending one ends the next; that must not nest."""
    check_bounds(await run_traffic({"raise": "feed"}, clients_with_poison=400, seconds=90.0))


@pytest.mark.slow
async def test_clients_with_short_deadlines_cause_no_more_shared_deaths(autojump_clock: trio.testing.MockClock) -> None:
    traffic = await run_traffic({"raise": "feed"}, deadline_s=8.0)
    assert len(traffic.shared_deaths) == 1
    assert len(traffic.deaths) <= 2


@pytest.mark.parametrize("how", [{"on_failure": "fail"}, {"replays": 0}])
@pytest.mark.slow
async def test_requests_that_are_not_replayed_are_quarantined_too(
    autojump_clock: trio.testing.MockClock, how: dict[str, Any]
) -> None:
    check_bounds(await run_traffic({"raise": "feed"}, **how))


async def test_poison_ends_by_its_deadline_when_no_replica_can_be_drained(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """The innocent requests take longer than a drain may."""
    traffic = await run_traffic(
        {"raise": "feed"}, pieces=int(3 * REPLICA_DRAIN_S / TURN_S), interval_s=10.0, deadline_s=60.0
    )
    assert len(traffic.deaths) == 1
    assert {type(error) for error in traffic.errors} == {DeadlineExceeded}


async def test_a_request_blamed_by_chance_completes_on_a_drained_replica(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FailsOnce, "has_failed", False)
    traffic = await run_traffic({"stderr": "blamed"}, engine=f"{__name__}:FailsOnce")
    assert len(traffic.deaths) == 1
    assert traffic.errors == []


@pytest.mark.slow
async def test_a_long_reload_does_not_count_as_waiting(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the reload, the culprit waits for a quiet stage as long as after a short one."""
    monkeypatch.setattr(FailsOnce, "has_failed", False)
    load_s = 2 * CULPRIT_WAIT_S
    traffic = await run_traffic({"stderr": "blamed"}, engine=f"{__name__}:FailsOnce", load_s=load_s, seconds=200.0)
    waits_until = load_s + POISON_AFTER_S + load_s + CULPRIT_WAIT_S
    assert waits_until <= min(traffic.completed) < waits_until + REPLICA_DRAIN_S + PROBATION_S


async def test_a_tried_request_starts_again_in_another_stage_at_once(autojump_clock: trio.testing.MockClock) -> None:
    """The worker of the first stage is killed while a request is on trial in the second."""
    async with open_simulated_system() as system:
        generation = system.ask()
        await until(lambda: system.unread > 0)
        system.spawner.living[Address("second", 0)].die(signal="SIGSEGV")
        await until(lambda: system.omni.health().stages["second"][0].restarts == 1 and system.omni.health().ready)
        began = trio.current_time()
        system.spawner.living[Address("first", 0)].kill()
        outputs = await read(generation)
        assert numbers(outputs) == list(range(PIECES))
        assert trio.current_time() - began < PROBATION_S, "it did not wait for the end of its trial"
        assert outputs[-1].metrics is not None
        assert outputs[-1].metrics.replays == 2


@pytest.mark.parametrize(("replays", "on_failure"), [(0, "replay"), (2, "fail")])
async def test_a_request_that_is_neither_replayed_nor_quarantined_has_no_fingerprint(
    autojump_clock: trio.testing.MockClock,
    monkeypatch: pytest.MonkeyPatch,
    replays: int,
    on_failure: Literal["replay", "fail"],
) -> None:
    def computed(*_: object) -> None:
        raise AssertionError("a fingerprint that nothing uses was computed")

    monkeypatch.setattr(request, "fingerprint", computed)
    stage = Stage(engine="echo", accepts=("script",), emits="text", options={"spin": True})
    pipeline = Pipeline(name="one", stages={"only": stage}, limits=Limits(replays=replays, quarantine_s=0))
    spawner = SimulatedSpawner(lambda address, pid: WorkerBehavior(LOAD_S, TURN_S), lambda note: None)
    async with OmniSystem.open(pipeline, spawner=spawner) as omni:
        poison = {"script": [Input({"echo": {"raise": "feed"}}), Input({})]}
        with pytest.raises(StageCrashed):
            await omni.submit(poison, ["text"], on_failure=on_failure).collect()
