"""The order of stopping, closing at any moment, and the last messages of a dead worker."""

from __future__ import annotations

import pytest
import trio
import trio.testing
from msgspec.structs import replace

from tests.supervisor.simulated_supervisor import DIAMOND, FINISHED, POLICY, SimulatedSystem


async def test_stages_are_stopped_in_reverse_order_with_their_own_timeouts(
    autojump_clock: trio.testing.MockClock,
) -> None:
    system = SimulatedSystem({"a": (), "b": ("a",), "c": ("b",)}, replicas=2, b={"shutdown_timeout_s": 7.0})
    async with system.running():
        system.worker("b", 1).wedged = True
        system.log.clear()
        began = trio.current_time()
    assert [set(system.logged("stop", "kill")[at : at + 2]) for at in (0, 2, 4)] == [
        {"c.0", "c.1"},
        {"b.0", "b.1"},
        {"a.0", "a.1"},
    ]
    assert [(at - began, name) for at, kind, name in system.log if kind == "kill"] == [(pytest.approx(7.0), "b.1")]
    assert not system.exits, "a requested stop is not reported as a death"


async def test_closing_while_workers_are_down_or_loading(autojump_clock: trio.testing.MockClock) -> None:
    for moment in (0.0, 0.4, 1.0, 3.0):
        system = SimulatedSystem(DIAMOND, mind={"restart": replace(POLICY, strategy="rest_for_one")})
        async with system.running():
            system.prepare = lambda worker: setattr(worker, "load_s", 2.0)
            system.worker("mind").die(exit_code=1)
            await trio.sleep(moment)
        assert not system.living


async def test_closing_while_the_first_of_a_group_is_restarted(autojump_clock: trio.testing.MockClock) -> None:
    """The order in which trio runs ready tasks is random, so the test repeats."""
    for _ in range(20):
        system = SimulatedSystem({"a": (), "b": ("a",)}, a={"restart": replace(POLICY, strategy="one_for_all")})
        with trio.CancelScope() as scope, trio.fail_after(100):
            async with system.running():
                system.prepare = lambda worker, scope=scope: scope.cancel()
                system.worker("a").die(signal="SIGKILL")
                await trio.sleep_forever()
        assert not system.living
        assert all(replica.incarnation.ended.is_set() for replica in system.supervisor.replicas.values())


async def test_messages_of_a_dead_worker_are_delivered_before_its_death(
    autojump_clock: trio.testing.MockClock,
) -> None:
    system = SimulatedSystem({"mind": ()})
    async with system.running():
        worker = system.worker("mind")
        for _ in range(5):
            worker.send(FINISHED)
        worker.die(signal="SIGKILL")
        await trio.testing.wait_all_tasks_blocked()
        assert [kind for _, kind, _ in system.log][2:8] == ["message"] * 5 + ["lost"]
