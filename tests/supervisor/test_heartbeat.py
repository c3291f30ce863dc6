"""Timeouts of loading and of steps, and the measurements that answers to pings carry."""

from __future__ import annotations

import math

import pytest
import trio
import trio.testing

from omni_actors.errors import WorkerExit
from omni_actors.protocol.messages import Address, Pong, Ready
from omni_actors.supervisor.replica import ReplicaState
from tests.supervisor.simulated_supervisor import SimulatedSystem, SimulatedWorker


@pytest.mark.parametrize("load_s", [9.9, 10.1])
async def test_a_worker_must_load_within_its_timeout(autojump_clock: trio.testing.MockClock, load_s: float) -> None:
    system = SimulatedSystem({"a": ()}, a={"load_timeout_s": 10.0})
    loads = iter((load_s, 0.0))
    system.prepare = lambda worker: setattr(worker, "load_s", next(loads))
    began = trio.current_time()
    async with system.running():
        if load_s < 10.0:
            assert not system.exits
        else:
            assert system.exits == [
                WorkerExit(
                    pid=1,
                    signal="SIGKILL",
                    exit_code=None,
                    stderr_tail=(),
                    reason="not loaded within 10 s (load_timeout_s)",
                )
            ]
            (killed,) = [at for at, kind, _ in system.log if kind == "kill"]
            assert killed - began == pytest.approx(10.0)


@pytest.mark.parametrize("after_s", [0.0, 0.1, 0.49, 0.5, 0.51, 7.3, 1000.2])
async def test_a_hang_is_found_in_time_whenever_it_begins(
    autojump_clock: trio.testing.MockClock, after_s: float
) -> None:
    system = SimulatedSystem({"a": ()}, a={"step_timeout_s": 10.0})
    async with system.running():
        await trio.sleep(after_s)
        system.worker("a").wedged = True
        hung = trio.current_time()
        while system.generations() != {"a.0": 2}:
            await system.supervisor.changes.park()
        await system.settle()
        (killed,) = [at for at, kind, _ in system.log if kind == "kill"]
        assert 10.0 <= killed - hung <= 11.0
        assert [str(exit) for exit in system.exits] == [
            "pid 1 was killed by SIGKILL: no progress for 10 s (step_timeout_s)"
        ]


async def test_a_hang_in_a_call_that_may_take_long_names_the_timeout_of_the_call(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    system = SimulatedSystem({"a": ()}, a={"step_timeout_s": 10.0})
    async with system.running():
        monkeypatch.setattr(system.supervisor.replicas[Address("a", 0)].incarnation.calls, "remaining_s", lambda: 25.0)
        await trio.sleep(1.0)  # two pings
        system.worker("a").wedged = True
        while system.generations() != {"a.0": 2}:
            await system.supervisor.changes.park()
        await system.settle()
        reason = "no progress for 25 s (the timeout of a call to its engine)"
        assert [str(exit) for exit in system.exits] == [f"pid 1 was killed by SIGKILL: {reason}"]


async def test_a_slow_worker_is_never_killed(autojump_clock: trio.testing.MockClock) -> None:
    system = SimulatedSystem({"a": ()}, a={"step_timeout_s": 10.0})
    system.prepare = lambda worker: setattr(worker, "turn_s", 9.9)
    async with system.running():
        await trio.sleep(2_000.0)
        assert not system.exits


async def test_time_in_which_the_parent_stood_still_does_not_count(
    mock_clock: trio.testing.MockClock,
) -> None:
    """The answer arrives meanwhile, and is read only after the timeout."""
    system = SimulatedSystem({"a": ()}, a={"step_timeout_s": 10.0, "load_timeout_s": 10.0})

    def mute(worker: SimulatedWorker) -> None:
        worker.load_s = worker.turn_s = math.inf

    system.prepare = mute
    async with trio.open_nursery() as nursery:
        nursery.start_soon(system.supervisor.run)
        await trio.testing.wait_all_tasks_blocked()
        worker = system.worker("a")
        mock_clock.jump(1000.0)
        worker.send(Ready(0.0))
        await trio.testing.wait_all_tasks_blocked()
        replica = system.supervisor.replicas[worker.address]
        assert replica.state is ReplicaState.READY
        for number in range(1, 10):
            assert replica.incarnation.ping == number
            mock_clock.jump(1000.0)
            worker.send(Pong(number))
            await trio.testing.wait_all_tasks_blocked()
            mock_clock.jump(1000.0)
            await trio.testing.wait_all_tasks_blocked()
        assert not system.exits
        nursery.cancel_scope.cancel()


async def test_an_engine_s_measurements_are_kept_until_its_worker_dies(autojump_clock: trio.testing.MockClock) -> None:
    """A later answer replaces them; an answer to an earlier ping does not."""
    system = SimulatedSystem({"a": ()}, a={"step_timeout_s": 10.0})
    system.prepare = lambda worker: setattr(worker, "turn_s", math.inf)
    async with system.running():
        worker = system.worker("a")
        replica = system.supervisor.replicas[worker.address]
        assert replica.gauges == {}
        for number in (1, 2):
            await trio.sleep(1.0)
            assert replica.incarnation.ping == number
            worker.send(Pong(number, {"waiting": number}))
            worker.send(Pong(number - 1, {"waiting": 9}))
            await trio.testing.wait_all_tasks_blocked()
            assert replica.gauges == {"waiting": number}
        worker.die(signal="SIGKILL")
        await trio.testing.wait_all_tasks_blocked()
        assert replica.gauges == {}
