"""When a replica is given up, when it is tried again, and when neither its intensity nor its type matters."""

from __future__ import annotations

import math

import pytest
import trio
import trio.testing
from msgspec.structs import replace

from omni_actors.errors import WorkerExit
from omni_actors.protocol.messages import Address, LoadFailed
from omni_actors.supervisor.giving_up import plan_retry
from omni_actors.supervisor.incarnation import Incarnation, IncarnationEvent
from omni_actors.supervisor.replica import ReplicaState
from tests.supervisor.simulated_supervisor import POLICY, SimulatedSystem


async def test_a_try_that_the_type_excludes_from_a_restart_is_the_last(autojump_clock: trio.testing.MockClock) -> None:
    policy = replace(POLICY, type="transient", intensity=0, retry_s=10.0)
    system = SimulatedSystem({"a": ()}, a={"restart": policy})
    async with system.running():
        system.prepare = lambda worker: worker.die(exit_code=0)
        system.worker("a").die(exit_code=1)
        while len(system.failures) < 2:
            await system.supervisor.changes.park()
        replica = system.supervisor.replicas[Address("a", 0)]
        assert (replica.generation, replica.retry_at) == (2, None)


async def test_a_first_worker_that_is_stopped_with_another_starts_again_although_it_could_not_load(
    autojump_clock: trio.testing.MockClock,
) -> None:
    system = SimulatedSystem({"a": (), "b": ()}, b={"restart": replace(POLICY, strategy="one_for_all")})
    system.prepare = lambda worker: setattr(worker, "load_s", math.inf)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(system.supervisor.run)
        await trio.testing.wait_all_tasks_blocked()
        system.worker("a").send(LoadFailed("no memory", None))
        await trio.testing.wait_all_tasks_blocked()
        system.prepare = lambda worker: None
        system.worker("b").die(exit_code=1)
        await system.settle()
        assert not system.failures
        assert system.generations() == {"a.0": 2, "b.0": 2}
        nursery.cancel_scope.cancel()


async def test_a_worker_with_a_part_that_was_taken_back_while_it_loaded_is_replaced_in_any_case(
    autojump_clock: trio.testing.MockClock,
) -> None:
    system = SimulatedSystem({"a": ()}, a={"restart": replace(POLICY, type="temporary", intensity=0)})
    system.prepare = lambda worker: setattr(worker, "load_s", 5.0)
    part = system.supervisor.desired.set("a", "adapters", {"names": ["wrong"]})
    async with trio.open_nursery() as nursery:
        nursery.start_soon(system.supervisor.run)
        await trio.sleep(1.0)
        system.supervisor.desired.take_back(part)
        await system.settle()
        replica = system.supervisor.replicas[Address("a", 0)]
        assert (replica.state, replica.generation, replica.incarnation.parts) == (ReplicaState.READY, 2, ())
        assert "taken back while it loaded" in str(system.exits[0])
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize(
    ("added", "load_error", "generation", "retry_at"),
    [
        pytest.param(True, "no memory", 1, None, id="its caller gets the error"),
        pytest.param(True, "no memory", 2, 110.0, id="it has loaded before"),
        pytest.param(True, None, 1, 110.0, id="it has loaded"),
        pytest.param(False, "no memory", 1, 110.0, id="it is one of the first"),
    ],
)
def test_only_a_replica_that_was_added_and_cannot_load_is_given_up_for_good(
    added: bool, load_error: str | None, generation: int, retry_at: float | None
) -> None:
    replica = SimulatedSystem({"a": ()}, a={"restart": replace(POLICY, retry_s=10.0)}).supervisor.replicas[
        Address("a", 0)
    ]
    replica.added, replica.generation, replica.incarnation.load_error = added, generation, load_error
    plan_retry(replica, WorkerExit(1, "SIGKILL", None), 100.0)
    assert replica.retry_at == retry_at


@pytest.mark.parametrize(("served_s", "failed_tries"), [(POLICY.period_s, 4), (POLICY.period_s + 0.5, 1)])
def test_a_worker_that_served_for_longer_than_the_period_resets_the_time_until_the_next_try(
    served_s: float, failed_tries: int
) -> None:
    replica = SimulatedSystem({"a": ()}).supervisor.replicas[Address("a", 0)]
    replica.failed_tries, replica.incarnation = 3, Incarnation()
    replica.incarnation.advance(IncarnationEvent.READY)
    replica.incarnation.ready_at = 1000.0
    plan_retry(replica, WorkerExit(1, "SIGKILL", None), 1000.0 + served_s)
    assert replica.failed_tries == failed_tries
