"""The events that the supervisor logs when workers die, are restarted, recover and are given up."""

from __future__ import annotations

import logging

import pytest
import trio.testing
from msgspec.structs import replace

from omni_actors.log_events import (
    LogEvent,
    ReplicaGivenUp,
    WorkerDied,
    WorkerEvent,
    WorkerRecovered,
    WorkerRestarted,
    log,
)
from omni_actors.protocol.messages import Address
from omni_actors.supervisor.replica import ReplicaState
from tests.supervisor.simulated_supervisor import POLICY, SimulatedSystem

ONE = {"one": ()}
LINE = {"one": (), "two": ("one",)}


@pytest.fixture(autouse=True)
def _all_events(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, log.name)


def events(caplog: pytest.LogCaptureFixture) -> list[LogEvent]:
    return [record.event for record in caplog.records if record.name == log.name]


def summary(caplog: pytest.LogCaptureFixture) -> list[tuple[type, str, int]]:
    return [(type(e), e.stage, e.generation) for e in events(caplog) if isinstance(e, WorkerEvent)]


async def test_a_first_start_and_a_stop_log_nothing(
    autojump_clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with SimulatedSystem(LINE).running():
        pass
    assert events(caplog) == []


async def test_the_lost_time_spans_restarts_that_fail(
    autojump_clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with SimulatedSystem(ONE).running() as system:
        system.unspawnable.add("one")
        system.held_by_next = 2
        began = trio.current_time()
        system.worker("one").die(exit_code=3)
        while len(system.exits) < 2:
            await system.supervisor.changes.park()
        system.unspawnable.clear()
        await system.settle()
        down_s = trio.current_time() - began
        system.worker("one").die(exit_code=4)
        await trio.testing.wait_all_tasks_blocked()
        await system.settle()
    assert summary(caplog) == [
        (WorkerDied, "one", 1),
        (WorkerDied, "one", 2),
        (WorkerRestarted, "one", 3),
        (WorkerRecovered, "one", 3),
        (WorkerDied, "one", 3),
        (WorkerRestarted, "one", 4),
        (WorkerRecovered, "one", 4),
    ]
    _, unspawned, restarted, recovered, _, _, last = events(caplog)
    assert isinstance(unspawned, WorkerDied)
    assert (unspawned.pid, unspawned.reason) == (None, "no process for one.0")
    assert str(unspawned).endswith("generation 2) could not be started: no process for one.0")
    assert isinstance(restarted, WorkerRestarted)
    assert isinstance(recovered, WorkerRecovered)
    assert isinstance(last, WorkerRecovered)
    assert {(e.signal, e.exit_code, e.requests) for e in (restarted, recovered)} == {(None, 3, 2)}, "of the first death"
    assert restarted.down_s == recovered.down_s == pytest.approx(down_s, abs=0.001)
    assert last.down_s > 0
    assert last.down_s != recovered.down_s, "it is counted from the last death"


async def test_replicas_that_are_restarted_with_a_dead_one_are_logged_too(
    autojump_clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    policy = replace(POLICY, strategy="rest_for_one")
    async with SimulatedSystem(LINE, one={"restart": policy}).running() as system:
        system.worker("one").die(signal="SIGSEGV")
        await trio.testing.wait_all_tasks_blocked()
        await system.settle()
    assert summary(caplog)[:2] == [(WorkerDied, "one", 1), (WorkerDied, "two", 1)]
    assert sorted(each[1:] for each in summary(caplog) if each[0] is WorkerRecovered) == [("one", 2), ("two", 2)]
    died = events(caplog)[1]
    assert isinstance(died, WorkerDied)
    assert died.reason == "restarted with stage 'one' (rest_for_one)"


async def test_a_replica_that_is_restarted_while_it_waits_for_a_place_has_a_reason(
    autojump_clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    policy = replace(POLICY, strategy="rest_for_one")
    async with SimulatedSystem(LINE, one={"restart": policy}).running() as system:
        system.unplaceable[Address("two", 0)] = "no device is free"
        system.worker("two").die(exit_code=3)
        await trio.sleep(1)
        system.worker("one").die(signal="SIGSEGV")
        await trio.testing.wait_all_tasks_blocked()
    died = [each for each in events(caplog) if isinstance(each, WorkerDied)][-1]
    assert (died.stage, died.pid) == ("two", None)
    assert died.reason == "restarted with stage 'one' (rest_for_one)"


async def test_a_replica_is_given_up_with_its_reason_and_its_retry(
    autojump_clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    policy = replace(POLICY, intensity=0, retry_s=7.0)
    async with SimulatedSystem(ONE, one={"restart": policy}).running() as system:
        system.ended_with_stage = 3
        system.worker("one").die(signal="SIGKILL")
        await trio.testing.wait_all_tasks_blocked()
    died, given_up = events(caplog)
    assert isinstance(died, WorkerDied)
    assert isinstance(given_up, ReplicaGivenUp)
    assert (given_up.signal, given_up.retry_in_s, given_up.requests, given_up.down_s) == ("SIGKILL", 7.0, 3, 0.0)
    assert str(given_up).endswith("it is tried again in 7 s, and 3 requests ended with it")
    assert "0 restarts were tried" in given_up.reason


@pytest.mark.parametrize(("replicas", "logged"), [(1, []), (2, [WorkerDied, ReplicaGivenUp])])
async def test_a_stage_that_cannot_load_is_left_to_the_caller_of_open(
    autojump_clock: trio.testing.MockClock,
    caplog: pytest.LogCaptureFixture,
    replicas: int,
    logged: list[type[LogEvent]],
) -> None:
    system = SimulatedSystem(ONE, replicas=replicas)
    system.unspawnable.add("one")
    async with system.running():
        assert all(each.state is ReplicaState.FAILED for each in system.supervisor.replicas.values())
    assert [type(event) for event in events(caplog)] == logged, "not the failure of the last replica"


async def test_a_stage_that_could_not_load_is_tried_again_and_each_try_is_logged(
    autojump_clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    system = SimulatedSystem(ONE)
    system.unspawnable.add("one")
    async with system.running():
        while not any(isinstance(event, ReplicaGivenUp) for event in events(caplog)):
            await system.supervisor.changes.park()
        assert sum(isinstance(event, WorkerDied) for event in events(caplog)) == 1, "a try has one worker"
        system.unspawnable.clear()
        [replica] = system.supervisor.replicas.values()
        while replica.state is not ReplicaState.READY:
            await system.supervisor.changes.park()
