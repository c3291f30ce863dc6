"""Which workers are restarted after a death, when, and when a replica is given up."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any, cast

import pytest
import trio
import trio.testing
from msgspec.structs import replace

from omni_actors.config import Restart
from omni_actors.protocol.messages import (
    Address,
    EngineFailed,
    LoadFailed,
)
from omni_actors.supervisor.replica import ReplicaState
from omni_actors.supervisor.restart import restart_delay_s
from omni_actors.supervisor.supervisor import MESSAGES_A_TURN
from tests.supervisor.simulated_supervisor import DIAMOND, FINISHED, POLICY, SimulatedSystem, SimulatedWorker

# restart strategies


@pytest.mark.parametrize(
    ("strategy", "stopped", "started"),
    [
        ("one_for_one", [], ["mind.0"]),
        ("rest_for_one", ["face.0", "voice.0"], ["mind.0", "voice.0", "face.0"]),
        (
            "one_for_all",
            ["face.0", "voice.0", "eye.0", "ear.0"],
            ["ear.0", "mind.0", "eye.0", "voice.0", "face.0"],
        ),
    ],
)
async def test_the_strategy_of_a_dead_worker_decides_which_others_are_restarted(
    autojump_clock: trio.testing.MockClock, strategy: Any, stopped: list[str], started: list[str]
) -> None:
    system = SimulatedSystem(DIAMOND, mind={"restart": replace(POLICY, strategy=strategy)})
    async with system.running():
        assert system.logged("spawn") == ["ear.0", "mind.0", "eye.0", "voice.0", "face.0"], (
            "in the order of the pipeline"
        )
        system.log.clear()
        system.worker("mind").die(signal="SIGKILL")
        await trio.testing.wait_all_tasks_blocked()
        assert system.logged("stop") == stopped, "in reverse order, and before the delay"
        await system.settle()
        assert system.logged("spawn") == started
        reason = f"restarted with stage 'mind' ({strategy})"
        assert [exit.reason for exit in system.exits] == [None] + [reason] * len(stopped)
        assert str(system.exits[0]) == f"pid {system.exits[0].pid} was killed by SIGKILL"
        assert all(reason in str(exit) for exit in system.exits[1:])


async def test_one_for_all_restarts_the_other_replicas_too_and_rest_for_one_does_not(
    autojump_clock: trio.testing.MockClock,
) -> None:
    for strategy, generation in (("one_for_all", 2), ("rest_for_one", 1)):
        system = SimulatedSystem(
            {"a": (), "b": ("a",)}, replicas=2, a={"restart": replace(POLICY, strategy=cast(Any, strategy))}
        )
        async with system.running():
            system.worker("a", 1).die(exit_code=1)
            await trio.testing.wait_all_tasks_blocked()
            await system.settle()
            assert system.generations() == {"a.0": generation, "a.1": 2, "b.0": 2, "b.1": 2}


async def test_a_worker_loads_behind_another_one_of_its_stage_that_serves(
    autojump_clock: trio.testing.MockClock,
) -> None:
    system = SimulatedSystem({"a": (), "b": ("a",)}, replicas=2)
    async with system.running():
        assert [worker.behind for worker in system.living.values()] == [False] * 4
        for replica in (0, 1):
            system.worker("a", replica).die(exit_code=1)
        await trio.testing.wait_all_tasks_blocked()
        await system.settle()
        assert {system.worker("a", replica).behind for replica in (0, 1)} == {False, True}, "the first one is alone"
        system.worker("a", 1).die(exit_code=1)
        await trio.testing.wait_all_tasks_blocked()
        await system.settle()
        assert system.worker("a", 1).behind


async def test_a_restart_caused_by_another_death_does_not_count(autojump_clock: trio.testing.MockClock) -> None:
    system = SimulatedSystem(
        {"a": (), "b": ("a",)},
        a={"restart": replace(POLICY, strategy="rest_for_one", intensity=5)},
        b={"restart": replace(POLICY, intensity=1)},
    )
    async with system.running():
        for _ in range(5):
            system.worker("a").die(signal="SIGSEGV")
            await trio.testing.wait_all_tasks_blocked()
            await system.settle()
        system.worker("b").die(exit_code=1)
        await trio.testing.wait_all_tasks_blocked()
        await system.settle()
        assert system.generations() == {"a.0": 6, "b.0": 7}
        assert not system.failures


async def test_a_temporary_worker_that_is_stopped_with_another_stays_down(
    autojump_clock: trio.testing.MockClock,
) -> None:
    system = SimulatedSystem(
        {"a": (), "b": ("a",), "c": ("b",)},
        a={"restart": replace(POLICY, strategy="rest_for_one")},
        b={"restart": replace(POLICY, type="temporary")},
    )
    async with system.running():
        system.worker("a").die(signal="SIGSEGV")
        await trio.testing.wait_all_tasks_blocked()
        await system.settle()
        assert [failure.stage for failure in system.failures] == ["b"]
        assert "temporary" in system.failures[0].reason
        assert system.generations() == {"a.0": 2, "b.0": 1, "c.0": 2}


async def test_simultaneous_deaths_restart_each_worker_once(autojump_clock: trio.testing.MockClock) -> None:
    """Each restarts the other one, unless that is down already: then it is left to its own restart."""
    for first, second in (("ear", "face"), ("face", "ear"), ("mind", "voice")):
        policy = replace(POLICY, strategy="one_for_all")
        system = SimulatedSystem(DIAMOND, **{name: {"restart": policy} for name in DIAMOND})
        async with system.running():
            system.worker(first).die(signal="SIGKILL")
            system.worker(second).die(signal="SIGKILL")
            await trio.testing.wait_all_tasks_blocked()
            await system.settle()
            assert set(system.generations().values()) == {2}


@pytest.mark.parametrize("seed", [*range(2), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 4))])
async def test_all_replicas_are_restarted_whenever_they_die(autojump_clock: trio.testing.MockClock, seed: int) -> None:
    """Also those that are loading, waiting to start, or being stopped with another."""
    draw = random.Random(seed)
    names: Any = ("one_for_one", "rest_for_one", "one_for_all")
    policies = {
        name: {
            "restart": replace(POLICY, intensity=1000, strategy=draw.choice(names)),
            "load_timeout_s": 20.0,
            "step_timeout_s": 5.0,
        }
        for name in DIAMOND
    }
    system = SimulatedSystem(DIAMOND, replicas=2, **policies)

    def prepare(worker: SimulatedWorker) -> None:
        worker.load_s = draw.choice((0.0, 1.0, 3.0, 30.0))
        worker.wedged = draw.random() < 0.1

    system.prepare = prepare
    with trio.fail_after(100_000):
        async with system.running():
            for _ in range(40):
                await trio.sleep(draw.choice((0.0, 0.1, 1.0, 10.0)))
                system.unspawnable = {"eye"} if draw.random() < 0.1 else set()
                for worker in draw.sample(list(system.living.values()), min(2, len(system.living))):
                    if worker.alive and draw.random() < 0.8:
                        worker.die(signal="SIGKILL")
                    else:
                        worker.wedged = True
            system.unspawnable, system.prepare = set(), lambda worker: None
            await trio.testing.wait_all_tasks_blocked()
            await system.settle()
            while any(worker.wedged for worker in system.living.values()):
                await trio.sleep(10.0)
                await system.settle()
            assert all(replica.state is ReplicaState.READY for replica in system.supervisor.replicas.values())
            assert len(system.living) == 2 * len(DIAMOND)
    assert not system.living


# restart types and intensity


@pytest.mark.parametrize(
    ("type_", "how", "restarted"),
    [
        ("permanent", {"exit_code": 0}, True),
        ("permanent", {"signal": "SIGKILL"}, True),
        ("transient", {"exit_code": 0}, False),
        ("transient", {"exit_code": 1}, True),
        ("transient", {"signal": "SIGTERM"}, True),
        ("temporary", {"exit_code": 0}, False),
        ("temporary", {"signal": "SIGSEGV"}, False),
    ],
)
async def test_the_type_decides_which_deaths_are_followed_by_a_restart(
    autojump_clock: trio.testing.MockClock, type_: Any, how: dict[str, Any], restarted: bool
) -> None:
    # the strategy applies only if the dead worker itself is restarted
    system = SimulatedSystem({"a": (), "b": ("a",)}, a={"restart": replace(POLICY, type=type_, strategy="one_for_all")})
    async with system.running():
        system.worker("a").die(**how)
        await trio.testing.wait_all_tasks_blocked()
        await system.settle()
        assert system.generations() == ({"a.0": 2, "b.0": 2} if restarted else {"a.0": 1, "b.0": 1})
        assert [failure.reason.endswith(f"it is {type_}") for failure in system.failures] == [True] * (not restarted)


async def test_past_the_intensity_a_replica_is_given_up_with_its_history(
    autojump_clock: trio.testing.MockClock,
) -> None:
    system = SimulatedSystem({"a": ()})
    async with system.running():
        for code in (1, 2, 3, 4):
            system.worker("a").die(exit_code=code)
            await trio.testing.wait_all_tasks_blocked()
            await system.settle()
        (failure,) = system.failures
        assert [(death.generation, death.exit.exit_code) for death in failure.history] == [
            (1, 1),
            (2, 2),
            (3, 3),
            (4, 4),
        ]
        assert [exit.exit_code for exit in failure.exits] == [1, 2, 3, 4]
        facts = (failure.stage, failure.replica, failure.generation, failure.pid, failure.signal, failure.exit_code)
        assert facts == ("a", 0, 4, 4, None, 4)
        assert "3 restarts were tried (intensity 3 within 60 s)" in failure.reason


async def test_restarts_are_forgotten_after_the_period(autojump_clock: trio.testing.MockClock) -> None:
    system = SimulatedSystem({"a": ()})
    async with system.running():
        for _ in range(20):
            await trio.sleep(31.0)
            system.worker("a").die(exit_code=1)
            await trio.testing.wait_all_tasks_blocked()
            await system.settle()
        assert not system.failures
        for _ in range(2):
            system.worker("a").die(exit_code=1)
            await trio.testing.wait_all_tasks_blocked()
            await system.settle()
        assert len(system.failures) == 1


async def test_failed_starts_count_and_are_not_forgotten_however_long_they_take(
    autojump_clock: trio.testing.MockClock,
) -> None:
    system = SimulatedSystem({"a": ()}, a={"load_timeout_s": 100.0})
    system.prepare = lambda worker: setattr(worker, "load_s", math.inf)
    async with system.running():
        assert system.generations() == {"a.0": 4}
        assert [exit.reason for exit in system.exits] == ["not loaded within 100 s (load_timeout_s)"] * 4


async def test_a_failed_spawn_counts_as_a_failed_start(autojump_clock: trio.testing.MockClock) -> None:
    system = SimulatedSystem({"a": ()})
    async with system.running():
        system.unspawnable = {"a"}
        system.worker("a").die(exit_code=1)
        await trio.testing.wait_all_tasks_blocked()
        await system.settle()
        (failure,) = system.failures
        assert (failure.generation, failure.pid, failure.signal, failure.exit_code) == (4, None, None, None)
        assert failure.stderr_tail == ()
        assert str(failure.exits[-1]) == "no process was started: no process for a.0"


def test_restart_delays_double_up_to_the_bound_and_spread() -> None:
    policy = Restart(intensity=5, period_s=60.0, backoff_s=0.1, backoff_max_s=1.0)
    for recent, most in ((0, 0.1), (1, 0.2), (2, 0.4), (3, 0.8), (4, 1.0), (50, 1.0), (5000, 1.0)):
        delays = [restart_delay_s(policy, recent) for _ in range(100)]
        assert most / 2 <= min(delays) < max(delays) <= most


async def test_delays_double_from_restart_to_restart(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(random, "uniform", lambda low, high: high)
    system = SimulatedSystem({"a": ()}, a={"restart": replace(POLICY, intensity=6)})
    system.prepare = lambda worker: worker.die(exit_code=1)
    async with system.running():
        times = [at for at, kind, _ in system.log if kind == "spawn"]
        assert [later - earlier for earlier, later in itertools.pairwise(times)] == [1, 2, 4, 8, 8, 8]


async def test_a_replica_that_was_given_up_is_tried_again_at_growing_intervals(
    autojump_clock: trio.testing.MockClock,
) -> None:
    half_open = replace(POLICY, intensity=0, backoff_s=0.001, retry_s=10.0, retry_max_s=25.0)
    system = SimulatedSystem({"a": ()}, a={"restart": half_open})
    async with system.running():
        system.prepare = lambda worker: worker.die(exit_code=1)
        system.worker("a").die(exit_code=1)
        await trio.sleep(100.0)
        times = [at for at, kind, _ in system.log if kind == "spawn"]
        assert [later - earlier for earlier, later in itertools.pairwise(times)] == [10, 20, 25, 25]
        assert len(system.failures) == 5
        system.prepare = lambda worker: None
        await trio.sleep(25.0)
        replica = system.supervisor.replicas[Address("a", 0)]
        assert (replica.state, replica.retry_at, replica.failure) == (ReplicaState.READY, None, None)
        await trio.sleep(POLICY.period_s + 1)
        system.worker("a").die(exit_code=1)
        await trio.sleep(10.5)
        assert replica.state is ReplicaState.READY, "it had served for long, so the interval begins anew"


@pytest.mark.parametrize("why", ["taken back", "stopped with another"])
async def test_a_replica_stays_given_up_when_its_try_ends_for_a_reason_outside_it(
    autojump_clock: trio.testing.MockClock, why: str
) -> None:
    """It is tried again soon, as after the first death: neither the interval nor the reason changes."""
    policy = replace(POLICY, intensity=0, retry_s=10.0, retry_max_s=1000.0)
    all_restart = replace(POLICY, strategy="one_for_all")
    system = SimulatedSystem({"a": (), "b": ()}, a={"restart": policy}, b={"restart": all_restart})
    async with system.running():
        replica = system.supervisor.replicas[Address("a", 0)]
        system.worker("a").die(exit_code=1)
        await trio.testing.wait_all_tasks_blocked()
        reason = system.failures[0].reason
        system.supervisor.desired.set("a", "adapters", {"names": ["wrong"]})
        system.prepare = lambda worker: setattr(worker, "load_s", math.inf)
        await trio.sleep(10.5)
        (part,) = system.supervisor.desired.parts("a")
        assert replica.incarnation.parts == (part,), "it is being tried"
        system.prepare = lambda worker: None
        if why == "taken back":
            system.worker("a").send(LoadFailed("no such adapter", 0))
            system.worker("a").die(exit_code=1)
        else:
            system.worker("b").die(exit_code=1)
        await trio.testing.wait_all_tasks_blocked()
        assert (replica.state, part.taken_back) == (ReplicaState.FAILED, why == "taken back")
        assert replica.retry_at is not None
        assert replica.retry_at <= trio.current_time() + POLICY.backoff_max_s
        assert {failure.reason for failure in system.failures} == {reason}
        await trio.sleep_until(replica.retry_at)
        await system.settle()
        await trio.testing.wait_all_tasks_blocked()
        assert (replica.state, replica.generation, replica.failure) == (ReplicaState.READY, 3, None)
        await trio.sleep(POLICY.backoff_max_s)
        assert system.generations() == {"a.0": 3, "b.0": 1 if why == "taken back" else 2}, "each started once"
        system.worker("a").die(exit_code=1)
        await trio.testing.wait_all_tasks_blocked()
        assert replica.retry_at == trio.current_time() + 20.0


async def test_deaths_that_do_not_count_never_give_up_a_replica(autojump_clock: trio.testing.MockClock) -> None:
    system = SimulatedSystem({"a": ()}, a={"restart": replace(POLICY, intensity=0)})
    system.counts = False
    async with system.running():
        for _ in range(5):
            system.worker("a").die(exit_code=1)
            await trio.testing.wait_all_tasks_blocked()
            await system.settle()
        assert system.generations() == {"a.0": 6}
        assert not system.failures


async def test_all_that_a_worker_sent_before_its_end_is_taken(autojump_clock: trio.testing.MockClock) -> None:
    system = SimulatedSystem({"a": ()})
    async with system.running():
        for _ in range(3 * MESSAGES_A_TURN):
            system.worker("a").send(FINISHED)
        system.worker("a").send(EngineFailed(42))
        system.worker("a").die(exit_code=1)
        await trio.testing.wait_all_tasks_blocked()
        assert len(system.logged("message")) == 3 * MESSAGES_A_TURN
        assert system.failed_requests == [42]


async def test_a_worker_whose_messages_cannot_be_read_any_more_is_killed(
    autojump_clock: trio.testing.MockClock,
) -> None:
    system = SimulatedSystem({"a": ()})
    async with system.running():
        worker = system.worker("a")
        worker.fault = "a torn packet"
        worker._messages.close()
        await trio.testing.wait_all_tasks_blocked()
        await system.settle()
        assert [exit.reason for exit in system.exits] == ["a torn packet"]
        assert system.generations() == {"a.0": 2}


async def test_the_request_for_which_the_engine_raised_is_reported_once(autojump_clock: trio.testing.MockClock) -> None:
    system = SimulatedSystem({"a": ()})
    async with system.running():
        system.worker("a").send(EngineFailed(42))
        system.worker("a").die(exit_code=1)
        await trio.testing.wait_all_tasks_blocked()
        await system.settle()
        system.worker("a").die(exit_code=1)
        await trio.testing.wait_all_tasks_blocked()
        assert system.failed_requests == [42, None], "it is not reported for the next worker"


async def test_no_request_is_to_blame_for_a_death_in_a_call(autojump_clock: trio.testing.MockClock) -> None:
    system = SimulatedSystem({"a": ()})
    async with system.running():
        system.worker("a").send(EngineFailed(None, "update_weights"))
        system.worker("a").die(exit_code=1)
        await trio.testing.wait_all_tasks_blocked()
        assert not system.failed_requests
        assert system.supervisor.replicas[Address("a", 0)].recent_restarts, "it counts against the intensity"


# sleeping stages


async def test_a_replica_that_is_put_to_sleep_before_its_restart_is_started_once_when_it_wakes(
    autojump_clock: trio.testing.MockClock,
) -> None:
    system = SimulatedSystem({"mind": ()})
    async with system.running():
        for woken_after_s in (0.1, 5.0):  # before and after the delay of the restart
            system.worker("mind").die(signal="SIGKILL")
            await trio.testing.wait_all_tasks_blocked()
            await system.supervisor.stop_stages(["mind"])
            assert system.supervisor.replicas[Address("mind", 0)].state is ReplicaState.ASLEEP
            system.log.clear()
            await trio.sleep(woken_after_s)
            assert not system.logged("spawn")
            await system.supervisor.start_stages(["mind"])
            await system.settle()
            await trio.sleep(60.0)
            assert system.logged("spawn") == ["mind.0"]


async def test_a_replica_that_was_given_up_sleeps_and_wakes(autojump_clock: trio.testing.MockClock) -> None:
    system = SimulatedSystem({"mind": ()}, mind={"restart": replace(POLICY, intensity=0)})
    async with system.running():
        system.worker("mind").die(signal="SIGKILL")
        await system.settle()
        await system.supervisor.stop_stages(["mind"])
        system.log.clear()
        await trio.sleep(1000.0)
        assert not system.logged("spawn")
        await system.supervisor.start_stages(["mind"])
        await system.settle()
        assert system.supervisor.replicas[Address("mind", 0)].state is ReplicaState.READY
        assert system.logged("spawn") == ["mind.0"]
