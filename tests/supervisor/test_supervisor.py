"""The supervisor's policy: simulated workers behind the Spawner seam, time by trio's mock clock."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, cast

import pytest
import trio
import trio.testing
from msgspec.structs import replace

from omni_actors.config import Restart, Stage
from omni_actors.errors import StageFailed, WorkerExit
from omni_actors.protocol.messages import (
    Address,
    Configure,
    ControlMessage,
    EngineFailed,
    Finished,
    Ping,
    Pong,
    Ready,
    StageStats,
    Stop,
    WorkerSpec,
)
from omni_actors.supervisor.edges import Edges
from omni_actors.supervisor.process import SpawnFailed, Worker
from omni_actors.supervisor.replica import ReplicaState
from omni_actors.supervisor.restart import downstream_stages
from omni_actors.supervisor.supervisor import Supervisor
from ringbuf import Ring

DIAMOND = {"ear": (), "mind": ("ear",), "eye": (), "voice": ("mind",), "face": ("mind", "eye")}
"""Stages and their inputs, in topological order."""
POLICY = Restart(intensity=3, period_s=60.0, backoff_s=1.0, backoff_max_s=8.0)
FINISHED = Finished(7, StageStats(stage="mind", started=0.0, finished=0.0, step_s=0.0, chunks=0, sent_bytes={}))


class SimulatedWorker:
    """Loads for ``load_s``, answers pings after ``turn_s``, stops when told; each as long as it is not ``wedged``."""

    def __init__(self, address: Address, pid: int, log: Callable[[str, Address], None], nursery: trio.Nursery) -> None:
        self.address, self.pid, self._log, self._nursery = address, pid, log, nursery
        self._say, self.incoming = trio.open_memory_channel[tuple[ControlMessage, tuple[int, ...]]](math.inf)
        self.mailbox = self
        self.fault = None
        self.load_s, self.turn_s, self.wedged = 0.0, 0.0, False
        self._exit: WorkerExit | None = None
        self._dead = trio.Event()

    @property
    def alive(self) -> bool:
        return self._exit is None

    def post(self, message: ControlMessage, fds: Sequence[int] = ()) -> None:
        match message:
            case Configure():
                self._nursery.start_soon(self._later, self.load_s, Ready(self.load_s))
            case Ping(number):
                self._nursery.start_soon(self._later, self.turn_s, Pong(number))
            case Stop() if not self.wedged:
                self._log("stop", self.address)
                self.die(exit_code=0)

    async def _later(self, delay_s: float, message: ControlMessage) -> None:
        await trio.sleep(delay_s)
        if self.alive and not self.wedged:
            self.say(message)

    def say(self, message: ControlMessage) -> None:
        self._say.send_nowait((message, ()))

    def kill(self) -> None:
        if self.alive:
            self._log("kill", self.address)
            self.die(signal="SIGKILL")

    def die(self, signal: str | None = None, exit_code: int | None = None) -> None:
        self._exit = WorkerExit(self.pid, signal, exit_code)
        self._say.close()
        self._dead.set()

    def unread(self) -> Iterator[ControlMessage]:
        with suppress(trio.WouldBlock, trio.EndOfChannel):
            while True:
                yield self.incoming.receive_nowait()[0]

    async def wait_ending(self) -> WorkerExit:
        return await self.wait_dead()

    async def wait_dead(self) -> WorkerExit:
        await self._dead.wait()
        assert self._exit is not None
        return self._exit


class World:
    """Spawner and listener in one: the workers that live, and all that happened, with its time."""

    def __init__(self, inputs: Mapping[str, tuple[str, ...]], replicas: int = 1, **stages: Any) -> None:
        """stages: configuration of stages by name, where it differs from the default."""
        self.log: list[tuple[float, str, str]] = []
        self.living: dict[Address, SimulatedWorker] = {}
        self.exits: list[WorkerExit] = []
        self.failures: list[StageFailed] = []
        self.failed_requests: list[int | None] = []
        self.counts = True
        """Whether deaths count against the restart intensity."""
        self.unspawnable: set[str] = set()
        self.prepare: Callable[[SimulatedWorker], None] = lambda worker: None
        """Called with every new worker."""
        self._pids = itertools.count(1)
        self.supervisor = Supervisor(
            [WorkerSpec(address=Address(name, replica), factory="") for name in inputs for replica in range(replicas)],
            {
                name: Stage(**({"engine": "echo", "inputs": sources, "restart": POLICY} | stages.get(name, {})))
                for name, sources in inputs.items()
            },
            edges=Edges([], self),
            spawner=self,
            listener=self,
            mailbox_capacity=8,
        )

    @asynccontextmanager
    async def running(self) -> AsyncIterator[World]:
        """Once all are ready."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.supervisor.run)
            await self.settle()
            yield self
            nursery.cancel_scope.cancel()

    async def settle(self) -> None:
        """Until all serve, or are given up."""
        while any(r.state not in (ReplicaState.READY, ReplicaState.FAILED) for r in self.supervisor.replicas.values()):
            await self.supervisor.changes.park()

    def worker(self, stage: str, replica: int = 0) -> SimulatedWorker:
        return self.living[Address(stage, replica)]

    def of(self, *kinds: str) -> list[str]:
        """Who did such things, in order."""
        return [name for _, kind, name in self.log if kind in kinds]

    def generations(self) -> dict[str, int]:
        return {str(address): replica.generation for address, replica in self.supervisor.replicas.items()}

    def _note(self, kind: str, address: Address) -> None:
        self.log.append((trio.current_time(), kind, str(address)))

    # the Spawner

    @asynccontextmanager
    async def spawn(self, address: Address, mailbox_capacity: int) -> AsyncIterator[Worker]:
        self._note("spawn", address)
        assert address not in self.living, f"two workers of {address}"
        if address.stage in self.unspawnable:
            raise SpawnFailed(f"no process for {address}")
        async with trio.open_nursery() as nursery:
            worker = self.living[address] = SimulatedWorker(address, next(self._pids), self._note, nursery)
            self.prepare(worker)
            try:
                yield cast(Worker, worker)
            finally:
                assert not worker.alive, "it is left as it lives"
                del self.living[address]
                nursery.cancel_scope.cancel()

    def create_ring(self, producer: Address, consumer: Address, capacity: int, generation: int) -> Ring:
        raise AssertionError("there are no edges")

    # the Listener

    def newest_request(self) -> int:
        return 0

    def on_worker_ready(self, address: Address) -> None:
        self._note("ready", address)

    def on_worker_died(self, address: Address, exit: WorkerExit, failed_request: int | None) -> bool:
        self.failed_requests.append(failed_request)
        return self.counts

    def on_worker_lost(self, address: Address, generation: int, exit: WorkerExit) -> None:
        self._note("lost", address)
        self.exits.append(exit)

    def on_stage_failed(self, failure: StageFailed) -> None:
        self.failures.append(failure)

    def on_message(self, address: Address, message: ControlMessage) -> None:
        self._note("heard", address)

    def on_output(self, address: Address, data: memoryview) -> None:
        raise AssertionError("there are no edges")


# who is restarted


@pytest.mark.parametrize(
    ("stage", "below"),
    [("ear", {"mind", "voice", "face"}), ("eye", {"face"}), ("mind", {"voice", "face"}), ("face", set())],
)
def test_the_stages_below(stage: str, below: set[str]) -> None:
    assert downstream_stages(stage, DIAMOND) == below


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
async def test_the_strategy_of_the_dead_says_who_goes_down_with_it(
    autojump_clock: trio.testing.MockClock, strategy: Any, stopped: list[str], started: list[str]
) -> None:
    world = World(DIAMOND, mind={"restart": replace(POLICY, strategy=strategy)})
    async with world.running():
        assert world.of("spawn") == ["ear.0", "mind.0", "eye.0", "voice.0", "face.0"], "in the order of the pipeline"
        world.log.clear()
        world.worker("mind").die(signal="SIGKILL")
        await trio.testing.wait_all_tasks_blocked()
        assert world.of("stop") == stopped, "in reverse, and before the delay"
        await world.settle()
        assert world.of("spawn") == started
        reason = f"restarted with stage 'mind' ({strategy})"
        assert [exit.reason for exit in world.exits] == [None] + [reason] * len(stopped)
        assert str(world.exits[0]) == f"pid {world.exits[0].pid} was killed by SIGKILL"
        assert all(reason in str(exit) for exit in world.exits[1:])


async def test_one_for_all_takes_the_other_replicas_too_and_rest_for_one_does_not(
    autojump_clock: trio.testing.MockClock,
) -> None:
    for strategy, generation in (("one_for_all", 2), ("rest_for_one", 1)):
        world = World({"a": (), "b": ("a",)}, replicas=2, a={"restart": replace(POLICY, strategy=cast(Any, strategy))})
        async with world.running():
            world.worker("a", 1).die(exit_code=1)
            await trio.testing.wait_all_tasks_blocked()
            await world.settle()
            assert world.generations() == {"a.0": generation, "a.1": 2, "b.0": 2, "b.1": 2}


async def test_a_restart_with_another_does_not_count(autojump_clock: trio.testing.MockClock) -> None:
    world = World(
        {"a": (), "b": ("a",)},
        a={"restart": replace(POLICY, strategy="rest_for_one", intensity=5)},
        b={"restart": replace(POLICY, intensity=1)},
    )
    async with world.running():
        for _ in range(5):
            world.worker("a").die(signal="SIGSEGV")
            await trio.testing.wait_all_tasks_blocked()
            await world.settle()
        world.worker("b").die(exit_code=1)
        await trio.testing.wait_all_tasks_blocked()
        await world.settle()
        assert world.generations() == {"a.0": 6, "b.0": 7}
        assert not world.failures


async def test_a_temporary_worker_that_goes_down_with_another_stays_down(
    autojump_clock: trio.testing.MockClock,
) -> None:
    world = World(
        {"a": (), "b": ("a",), "c": ("b",)},
        a={"restart": replace(POLICY, strategy="rest_for_one")},
        b={"restart": replace(POLICY, type="temporary")},
    )
    async with world.running():
        world.worker("a").die(signal="SIGSEGV")
        await trio.testing.wait_all_tasks_blocked()
        await world.settle()
        assert [failure.stage for failure in world.failures] == ["b"]
        assert "temporary" in world.failures[0].reason
        assert world.generations() == {"a.0": 2, "b.0": 1, "c.0": 2}


async def test_deaths_at_once_bring_everybody_back_once(autojump_clock: trio.testing.MockClock) -> None:
    """Each takes the other down; the one that is down already is left to its own restart."""
    for first, second in (("ear", "face"), ("face", "ear"), ("mind", "voice")):
        policy = replace(POLICY, strategy="one_for_all")
        world = World(DIAMOND, **{name: {"restart": policy} for name in DIAMOND})
        async with world.running():
            world.worker(first).die(signal="SIGKILL")
            world.worker(second).die(signal="SIGKILL")
            await trio.testing.wait_all_tasks_blocked()
            await world.settle()
            assert set(world.generations().values()) == {2}


@pytest.mark.parametrize("seed", range(4))
async def test_whatever_dies_whenever_all_come_back(autojump_clock: trio.testing.MockClock, seed: int) -> None:
    """Also of those that are loading, waiting to start, or being stopped for another."""
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
    world = World(DIAMOND, replicas=2, **policies)

    def prepare(worker: SimulatedWorker) -> None:
        worker.load_s = draw.choice((0.0, 1.0, 3.0, 30.0))
        worker.wedged = draw.random() < 0.1

    world.prepare = prepare
    with trio.fail_after(100_000):
        async with world.running():
            for _ in range(40):
                await trio.sleep(draw.choice((0.0, 0.1, 1.0, 10.0)))
                world.unspawnable = {"eye"} if draw.random() < 0.1 else set()
                for worker in draw.sample(list(world.living.values()), min(2, len(world.living))):
                    if worker.alive and draw.random() < 0.8:
                        worker.die(signal="SIGKILL")
                    else:
                        worker.wedged = True
            world.unspawnable, world.prepare = set(), lambda worker: None
            await trio.testing.wait_all_tasks_blocked()
            await world.settle()
            while any(worker.wedged for worker in world.living.values()):
                await trio.sleep(10.0)
                await world.settle()
            assert all(replica.state is ReplicaState.READY for replica in world.supervisor.replicas.values())
            assert len(world.living) == 2 * len(DIAMOND)
    assert not world.living


# whether it is restarted


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
async def test_the_type_says_which_deaths_are_followed_by_a_restart(
    autojump_clock: trio.testing.MockClock, type_: Any, how: dict[str, Any], restarted: bool
) -> None:
    # a strategy only acts where the dead one itself comes back
    world = World({"a": (), "b": ("a",)}, a={"restart": replace(POLICY, type=type_, strategy="one_for_all")})
    async with world.running():
        world.worker("a").die(**how)
        await trio.testing.wait_all_tasks_blocked()
        await world.settle()
        assert world.generations() == ({"a.0": 2, "b.0": 2} if restarted else {"a.0": 1, "b.0": 1})
        assert [failure.reason.endswith(f"it is {type_}") for failure in world.failures] == [True] * (not restarted)


async def test_past_the_intensity_it_is_given_up_with_its_history(autojump_clock: trio.testing.MockClock) -> None:
    world = World({"a": ()})
    async with world.running():
        for code in (1, 2, 3, 4):
            world.worker("a").die(exit_code=code)
            await trio.testing.wait_all_tasks_blocked()
            await world.settle()
        (failure,) = world.failures
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
    world = World({"a": ()})
    async with world.running():
        for _ in range(20):
            await trio.sleep(31.0)
            world.worker("a").die(exit_code=1)
            await trio.testing.wait_all_tasks_blocked()
            await world.settle()
        assert not world.failures
        for _ in range(2):
            world.worker("a").die(exit_code=1)
            await trio.testing.wait_all_tasks_blocked()
            await world.settle()
        assert len(world.failures) == 1


async def test_failed_starts_count_and_are_not_forgotten_however_long_they_take(
    autojump_clock: trio.testing.MockClock,
) -> None:
    world = World({"a": ()}, a={"load_timeout_s": 100.0})
    world.prepare = lambda worker: setattr(worker, "load_s", math.inf)
    async with world.running():
        assert world.generations() == {"a.0": 4}
        assert [exit.reason for exit in world.exits] == ["not loaded within 100 s (load_timeout_s)"] * 4


async def test_a_machine_that_gives_no_process_counts_as_a_failed_start(autojump_clock: trio.testing.MockClock) -> None:
    world = World({"a": ()})
    async with world.running():
        world.unspawnable = {"a"}
        world.worker("a").die(exit_code=1)
        await trio.testing.wait_all_tasks_blocked()
        await world.settle()
        (failure,) = world.failures
        assert (failure.generation, failure.exit_code, failure.stderr_tail) == (4, 127, ("no process for a.0",))


async def test_delays_double_from_restart_to_restart(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(random, "uniform", lambda low, high: high)
    world = World({"a": ()}, a={"restart": replace(POLICY, intensity=6)})
    world.prepare = lambda worker: worker.die(exit_code=1)
    async with world.running():
        times = [at for at, kind, _ in world.log if kind == "spawn"]
        assert [later - earlier for earlier, later in itertools.pairwise(times)] == [1, 2, 4, 8, 8, 8]


# deadlines


@pytest.mark.parametrize("load_s", [9.9, 10.1])
async def test_the_time_to_load(autojump_clock: trio.testing.MockClock, load_s: float) -> None:
    world = World({"a": ()}, a={"load_timeout_s": 10.0})
    loads = iter((load_s, 0.0))
    world.prepare = lambda worker: setattr(worker, "load_s", next(loads))
    began = trio.current_time()
    async with world.running():
        if load_s < 10.0:
            assert not world.exits
        else:
            assert world.exits == [WorkerExit(1, "SIGKILL", None, (), "not loaded within 10 s (load_timeout_s)")]
            (killed,) = [at for at, kind, _ in world.log if kind == "kill"]
            assert killed - began == pytest.approx(10.0)


@pytest.mark.parametrize("after_s", [0.0, 0.1, 0.49, 0.5, 0.51, 7.3, 1000.2])
async def test_a_hang_is_seen_within_its_time_whenever_it_begins(
    autojump_clock: trio.testing.MockClock, after_s: float
) -> None:
    world = World({"a": ()}, a={"step_timeout_s": 10.0})
    async with world.running():
        await trio.sleep(after_s)
        world.worker("a").wedged = True
        hung = trio.current_time()
        while world.generations() != {"a.0": 2}:
            await world.supervisor.changes.park()
        await world.settle()
        (killed,) = [at for at, kind, _ in world.log if kind == "kill"]
        assert 10.0 <= killed - hung <= 11.0
        assert [str(exit) for exit in world.exits] == [
            "pid 1 was killed by SIGKILL: no progress for 10 s (step_timeout_s)"
        ]


async def test_a_slow_worker_is_never_killed(autojump_clock: trio.testing.MockClock) -> None:
    world = World({"a": ()}, a={"step_timeout_s": 10.0})
    world.prepare = lambda worker: setattr(worker, "turn_s", 9.9)
    async with world.running():
        await trio.sleep(2_000.0)
        assert not world.exits


async def test_the_time_in_which_this_process_stood_still_is_not_the_worker_s(
    mock_clock: trio.testing.MockClock,
) -> None:
    """The answer came meanwhile; it is read only after the time is over."""
    world = World({"a": ()}, a={"step_timeout_s": 10.0, "load_timeout_s": 10.0})

    def mute(worker: SimulatedWorker) -> None:
        worker.load_s = worker.turn_s = math.inf

    world.prepare = mute
    async with trio.open_nursery() as nursery:
        nursery.start_soon(world.supervisor.run)
        await trio.testing.wait_all_tasks_blocked()
        worker = world.worker("a")
        mock_clock.jump(1000.0)
        worker.say(Ready(0.0))
        await trio.testing.wait_all_tasks_blocked()
        replica = world.supervisor.replicas[worker.address]
        assert replica.state is ReplicaState.READY
        for number in range(1, 10):
            assert replica.incarnation.ping == number
            mock_clock.jump(1000.0)
            worker.say(Pong(number))
            await trio.testing.wait_all_tasks_blocked()
            mock_clock.jump(1000.0)
            await trio.testing.wait_all_tasks_blocked()
        assert not world.exits
        nursery.cancel_scope.cancel()


async def test_what_an_engine_measures_is_kept_until_its_worker_dies(autojump_clock: trio.testing.MockClock) -> None:
    """A later answer replaces it; an answer to a ping before the last one is no news."""
    world = World({"a": ()}, a={"step_timeout_s": 10.0})
    world.prepare = lambda worker: setattr(worker, "turn_s", math.inf)
    async with world.running():
        worker = world.worker("a")
        replica = world.supervisor.replicas[worker.address]
        assert replica.gauges == {}
        for number in (1, 2):
            await trio.sleep(1.0)
            assert replica.incarnation.ping == number
            worker.say(Pong(number, {"waiting": number}))
            worker.say(Pong(number - 1, {"waiting": 9}))
            await trio.testing.wait_all_tasks_blocked()
            assert replica.gauges == {"waiting": number}
        worker.die(signal="SIGKILL")
        await trio.testing.wait_all_tasks_blocked()
        assert replica.gauges == {}


# the end


async def test_stages_are_stopped_in_reverse_each_with_its_own_time(autojump_clock: trio.testing.MockClock) -> None:
    world = World({"a": (), "b": ("a",), "c": ("b",)}, replicas=2, b={"shutdown_timeout_s": 7.0})
    async with world.running():
        world.worker("b", 1).wedged = True
        world.log.clear()
        began = trio.current_time()
    assert [set(world.of("stop", "kill")[at : at + 2]) for at in (0, 2, 4)] == [
        {"c.0", "c.1"},
        {"b.0", "b.1"},
        {"a.0", "a.1"},
    ]
    assert [(at - began, name) for at, kind, name in world.log if kind == "kill"] == [(pytest.approx(7.0), "b.1")]
    assert not world.exits, "an end that was asked for is nobody's loss"


async def test_closing_while_some_are_down_or_loading(autojump_clock: trio.testing.MockClock) -> None:
    for moment in (0.0, 0.4, 1.0, 3.0):
        world = World(DIAMOND, mind={"restart": replace(POLICY, strategy="rest_for_one")})
        async with world.running():
            world.prepare = lambda worker: setattr(worker, "load_s", 2.0)
            world.worker("mind").die(exit_code=1)
            await trio.sleep(moment)
        assert not world.living


async def test_closing_as_the_first_of_a_group_is_started_again(autojump_clock: trio.testing.MockClock) -> None:
    """The order in which trio runs tasks that are ready is up to chance: it is tried often enough."""
    for _ in range(20):
        world = World({"a": (), "b": ("a",)}, a={"restart": replace(POLICY, strategy="one_for_all")})
        with trio.CancelScope() as scope, trio.fail_after(100):
            async with world.running():
                world.prepare = lambda worker, scope=scope: scope.cancel()
                world.worker("a").die(signal="SIGKILL")
                await trio.sleep_forever()
        assert not world.living
        assert all(replica.incarnation.ended.is_set() for replica in world.supervisor.replicas.values())


async def test_what_a_worker_said_before_it_died_is_heard_before_its_death(
    autojump_clock: trio.testing.MockClock,
) -> None:
    world = World({"mind": ()})
    async with world.running():
        worker = world.worker("mind")
        for _ in range(5):
            worker.say(FINISHED)
        worker.die(signal="SIGKILL")
        await trio.testing.wait_all_tasks_blocked()
        assert [kind for _, kind, _ in world.log][2:8] == ["heard"] * 5 + ["lost"]


async def test_a_replica_that_was_given_up_is_tried_again_at_growing_intervals(
    autojump_clock: trio.testing.MockClock,
) -> None:
    half_open = replace(POLICY, intensity=0, backoff_s=0.001, retry_s=10.0, retry_max_s=25.0)
    world = World({"a": ()}, a={"restart": half_open})
    async with world.running():
        world.prepare = lambda worker: worker.die(exit_code=1)
        world.worker("a").die(exit_code=1)
        await trio.sleep(100.0)
        times = [at for at, kind, _ in world.log if kind == "spawn"]
        assert [later - earlier for earlier, later in itertools.pairwise(times)] == [10, 20, 25, 25]
        assert len(world.failures) == 5
        world.prepare = lambda worker: None
        await trio.sleep(25.0)
        replica = world.supervisor.replicas[Address("a", 0)]
        assert (replica.state, replica.retry_at, replica.failure) == (ReplicaState.READY, None, None)
        await trio.sleep(POLICY.period_s + 1)
        world.worker("a").die(exit_code=1)
        await trio.sleep(10.5)
        assert replica.state is ReplicaState.READY, "it had served for long: the interval begins anew"


async def test_deaths_that_do_not_count_never_give_a_replica_up(autojump_clock: trio.testing.MockClock) -> None:
    world = World({"a": ()}, a={"restart": replace(POLICY, intensity=0)})
    world.counts = False
    async with world.running():
        for _ in range(5):
            world.worker("a").die(exit_code=1)
            await trio.testing.wait_all_tasks_blocked()
            await world.settle()
        assert world.generations() == {"a.0": 6}
        assert not world.failures


async def test_what_the_engine_was_called_for_when_it_raised_is_told(autojump_clock: trio.testing.MockClock) -> None:
    world = World({"a": ()})
    async with world.running():
        world.worker("a").say(EngineFailed(42))
        world.worker("a").die(exit_code=1)
        await trio.testing.wait_all_tasks_blocked()
        await world.settle()
        world.worker("a").die(exit_code=1)
        await trio.testing.wait_all_tasks_blocked()
        assert world.failed_requests == [42, None], "and nothing of it is left for the next worker"
