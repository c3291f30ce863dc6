"""A replica for which there is no place waits, and says why; this counts neither as loading nor as a death."""

from __future__ import annotations

import trio
import trio.testing

from omni_actors.config import Restart
from omni_actors.supervisor.replica import ReplicaState
from tests.supervisor.simulated_supervisor import SimulatedSystem

WHY = "no node can run mind.0: n1: it is lost"


async def test_a_replica_waits_for_a_place(autojump_clock: trio.testing.MockClock) -> None:
    system = SimulatedSystem({"mind": ()}, mind={"load_timeout_s": 5.0})
    async with system.running():
        [(address, replica)] = system.supervisor.replicas.items()
        system.unplaceable[address] = WHY
        system.worker("mind").die(exit_code=1)
        await trio.sleep(100.0)
        assert (replica.state, replica.note) == (ReplicaState.RESTARTING, WHY)
        del system.unplaceable[address]
        system.places.unpark_all()
        await trio.sleep(4.0)
        assert (replica.state, replica.note) == (ReplicaState.READY, "ready")
        assert len(system.exits) == 1


async def test_a_replica_that_gets_no_worker_for_now_has_no_place(autojump_clock: trio.testing.MockClock) -> None:
    """A restart keeps the place. Sleep, removal and giving up release it, when nothing of the worker is left."""
    system = SimulatedSystem({"mind": ()}, replicas=2, mind={"restart": Restart(intensity=1, retry_s=7.0)})
    async with system.running():
        first, second = system.supervisor.replicas.values()
        system.worker("mind").die(exit_code=1)
        await trio.sleep(1.0)
        assert system.released == []
        system.worker("mind").die(exit_code=1)
        await trio.testing.wait_all_tasks_blocked()
        assert (first.state, system.released) == (ReplicaState.FAILED, [first.address])
        await trio.sleep(8.0)
        assert first.state is ReplicaState.READY
        await system.supervisor.stop_stages(["mind"])
        assert system.released[1:] == [first.address, second.address]
        await system.supervisor.remove(second, None)
        assert system.released[3:] == [second.address]


async def test_closing_while_a_replica_waits_for_a_place(autojump_clock: trio.testing.MockClock) -> None:
    system = SimulatedSystem({"mind": ()})
    async with system.running():
        [address] = system.supervisor.replicas
        system.unplaceable[address] = WHY
        system.worker("mind").die(exit_code=1)
        await trio.sleep(100.0)
    assert not system.living
    assert len(system.exits) == 1
