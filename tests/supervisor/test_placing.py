"""A replica for which there is no place waits, and says why; this counts neither as loading nor as a death."""

from __future__ import annotations

import trio
import trio.testing

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


async def test_closing_while_a_replica_waits_for_a_place(autojump_clock: trio.testing.MockClock) -> None:
    system = SimulatedSystem({"mind": ()})
    async with system.running():
        [address] = system.supervisor.replicas
        system.unplaceable[address] = WHY
        system.worker("mind").die(exit_code=1)
        await trio.sleep(100.0)
    assert not system.living
    assert len(system.exits) == 1
