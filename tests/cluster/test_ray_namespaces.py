"""Systems on a Ray whose nodes are three network namespaces: partitions, and the death of Ray's own parts.

The parent is on the head's node, the stages are on the two others, each of which may take the other one's.
"""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from pathlib import Path

import psutil
import pytest
import trio

from omni_actors import OmniSystem
from omni_actors.cluster.placement import PARENT, Node
from omni_actors.cluster.ray_nodes import RayAgents, open_ray
from omni_actors.cluster.spawner import LEASE_S, ClusterSpawner, open_cluster
from omni_actors.errors import ClusterUnavailable
from omni_actors.generation import Generation
from omni_actors.outputs import Output
from tests.cluster.long_answers import (
    OUTPUTS,
    ask_long,
    assert_one_writer_at_a_time,
    check_exact,
    check_served,
    has_ended,
    long_answers,
    lose_in_flight,
    wait_ended,
    with_frail,
)
from tests.cluster.ray_namespaces import GCS, RAYLET, RayNodes, ray_on
from tests.cluster.subprocess_cluster import FixedPlaces
from tests.support.echo_systems import generation_of, pid_of, read, wait_restarted
from tests.support.network import namespaces

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.usefixtures("needs_namespaces"),
]
SHORT_LEASE_S = 6.0
PLACES: dict[str, str | Sequence[str]] = {"first": ("n1", "n2"), "second": ("n2", "n1"), "frail": ("n2", "n1")}
NO_HEAD_S = 10
"""Seconds after which Ray's nodes end without their head; a minute by default."""
WATCHDOG_S = 120.0


@pytest.fixture(scope="module")
def ray() -> Iterator[RayNodes]:
    """A Ray that has all its nodes at the start of each test."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_gcs_rpc_server_reconnect_timeout_s", str(NO_HEAD_S))
        with namespaces(3) as nodes, ray_on(nodes) as started:
            yield started


@pytest.fixture(autouse=True)
def _on_the_heads_node(ray: RayNodes, fixture_processes: set[int]) -> Iterator[None]:
    """Run the test there. At its end, nothing of ours is left on any node; what Ray keeps belongs to the cluster."""
    ray.restart_ended()
    fixture_processes |= ray.pids()
    with ray.nodes["head"].entered():
        yield
    fixture_processes |= ray.pids() - ray.agents_and_workers()


@pytest.fixture
def writers(tmp_path: Path) -> Path:
    """Where the workers log their lives."""
    return tmp_path / "writers"


class OnRay:
    """A system, its spawner, and its connection with Ray."""

    def __init__(self, omni: OmniSystem, spawner: ClusterSpawner, agents: RayAgents) -> None:
        self.omni, self.spawner, self.agents = omni, spawner, agents

    async def until_back(self, node: str, lost: int) -> None:
        """Wait until a node has a newer agent than the one with the number ``lost``, which may start workers."""
        with trio.fail_after(WATCHDOG_S):
            while (agent := self.spawner.agents[node]).number == lost or not agent.up.is_set() or agent.lost:  # noqa: ASYNC110
                await trio.sleep(0.05)

    async def until_connected(self) -> None:
        """Wait until the parent is connected with Ray's head."""
        with trio.fail_after(WATCHDOG_S):
            while True:
                with suppress(ClusterUnavailable):
                    return await self.agents.connect()
                await trio.sleep(0.05)


@asynccontextmanager
async def opened(
    ray: RayNodes, writers: Path, *, lease_s: float = SHORT_LEASE_S, step_s: float = 0.01
) -> AsyncIterator[OnRay]:
    async with open_ray(ray.address) as agents:
        nodes = [Node(name=PARENT), Node(name="n1"), Node(name="n2")]
        host = ray.nodes["head"].address
        async with (
            open_cluster(nodes, agents, FixedPlaces(PLACES), host=host, lease_s=lease_s) as spawner,
            OmniSystem.open(with_frail(long_answers(writers, step_s=step_s)), spawner=spawner) as omni,
        ):
            ours = {pid_of(omni, stage) for stage in PLACES} | {agent.pid for agent in spawner.agents.values()}
            assert ray.agents_and_workers() == ours
            yield OnRay(omni, spawner, agents)
    with trio.fail_after(WATCHDOG_S):
        while left := ray.agents_and_workers():
            await wait_ended(*left)


@contextmanager
def partition(ray: RayNodes, lost: Mapping[str, Sequence[str]]) -> Iterator[None]:
    """Lose what nodes send. lost: the receivers of each sender."""
    with ExitStack() as muted:
        for sender, receivers in lost.items():
            muted.enter_context(ray.nodes[sender].muted(*(ray.nodes[each] for each in receivers)))
        yield


FROM_N2 = {"n2": ("head", "n1")}
TO_N2 = {"head": ("n2",), "n1": ("n2",)}
PARTITIONS = {"from n2": FROM_N2, "to n2": TO_N2, "both ways": FROM_N2 | TO_N2}


async def read_through(
    generation: Generation, ray: RayNodes, lost: Mapping[str, Sequence[str]], seconds: float
) -> list[Output]:
    """Read all outputs; from the first one on, the nodes are partitioned for some seconds, and some are held back."""
    outputs: list[Output] = []

    async def cut() -> None:
        with partition(ray, lost):
            await trio.sleep(seconds)
            assert len(outputs) < 2 * OUTPUTS

    with trio.fail_after(WATCHDOG_S):
        async with trio.open_nursery() as nursery:
            async for output in generation:
                if not outputs:
                    nursery.start_soon(cut)
                outputs.append(output)
    return outputs


@pytest.mark.parametrize("lost", PARTITIONS.values(), ids=PARTITIONS)
async def test_a_partition_of_five_seconds_only_delays(
    ray: RayNodes, writers: Path, lost: Mapping[str, Sequence[str]]
) -> None:
    async with opened(ray, writers, lease_s=2 * LEASE_S, step_s=0.05) as on:  # TCP resends after 3 and after 6 s
        generation = ask_long(on.omni)
        check_exact(generation, await read_through(generation, ray, lost, 5.0))
        check_exact(after := ask_long(on.omni), await read(after))
        assert {generation_of(on.omni, stage) for stage in PLACES} == {1}
        assert assert_one_writer_at_a_time(writers) == len(PLACES)


@pytest.mark.parametrize("lost", PARTITIONS.values(), ids=PARTITIONS)
async def test_no_request_is_lost_in_a_partition_of_five_seconds_with_the_default_lease(
    ray: RayNodes, writers: Path, lost: Mapping[str, Sequence[str]]
) -> None:
    """The lease may run out, because TCP resends late. Then the node's worker moves."""
    async with opened(ray, writers, lease_s=LEASE_S, step_s=0.05) as on:
        generation = ask_long(on.omni)
        check_exact(generation, await read_through(generation, ray, lost, 5.0))
        check_exact(after := ask_long(on.omni), await read(after))
        assert_one_writer_at_a_time(writers)


@pytest.mark.parametrize("lost", PARTITIONS.values(), ids=PARTITIONS)
async def test_the_workers_of_a_node_that_is_cut_off_move_and_it_is_used_again(
    ray: RayNodes, writers: Path, lost: Mapping[str, Sequence[str]]
) -> None:
    async with opened(ray, writers, step_s=0.05) as on:
        worker, agent = psutil.Process(pid_of(on.omni, "second")), on.spawner.agents["n2"].number
        with ExitStack() as cut:
            await lose_in_flight(on.omni, "n2", lambda: cut.enter_context(partition(ray, lost)))
            assert has_ended(worker)
            await check_served(on.omni)
            assert ray.node_of(pid_of(on.omni, "second")) == "n1"
        await on.until_back("n2", agent)
        os.kill(pid_of(on.omni, "second"), signal.SIGKILL)
        await wait_restarted(on.omni, "second", 3)
        await check_served(on.omni)
        assert ray.node_of(pid_of(on.omni, "second")) == "n2"
        assert_one_writer_at_a_time(writers)


async def test_the_workers_of_a_killed_agent_start_again(ray: RayNodes, writers: Path) -> None:
    async with opened(ray, writers) as on:
        worker, agent = psutil.Process(pid_of(on.omni, "second")), on.spawner.agents["n2"]
        await lose_in_flight(on.omni, "n2", lambda: os.kill(agent.pid, signal.SIGKILL))
        assert has_ended(worker)
        await on.until_back("n2", agent.number)
        await check_served(on.omni)
        assert_one_writer_at_a_time(writers)


async def test_a_node_without_its_raylet_is_used_again_when_it_is_back(ray: RayNodes, writers: Path) -> None:
    async with opened(ray, writers) as on:
        worker, agent = psutil.Process(pid_of(on.omni, "second")), on.spawner.agents["n2"]
        await lose_in_flight(on.omni, "n2", ray.process("n2", RAYLET).kill)
        while not agent.fenced.is_set():  # Ray's processes end one after the other: some request is interrupted
            check_exact(generation := ask_long(on.omni), await read(generation))
        assert has_ended(worker)
        await wait_restarted(on.omni, "second", 2)
        assert ray.node_of(pid_of(on.omni, "second")) == "n1"
        await trio.to_thread.run_sync(ray.restart, ["n2"])  # meanwhile leases are renewed
        await on.until_back("n2", agent.number)
        os.kill(pid_of(on.omni, "second"), signal.SIGKILL)
        await wait_restarted(on.omni, "second", 3)
        await check_served(on.omni)
        assert ray.node_of(pid_of(on.omni, "second")) == "n2"
        assert_one_writer_at_a_time(writers)


HEADS: dict[str, Callable[[RayNodes], None]] = {
    "its control store": lambda ray: ray.process("head", GCS).kill(),
    "its raylet": lambda ray: ray.process("head", RAYLET).kill(),
    "all of it": lambda ray: ray.kill("head"),
}
"""What is killed of the head's node, which is the parent's, too."""


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "kill",
    [
        pytest.param(HEADS[what], id=what, marks=pytest.mark.exhaustive if what == "its raylet" else ())
        for what in HEADS
    ],
)
async def test_a_system_goes_on_with_a_new_head(ray: RayNodes, writers: Path, kill: Callable[[RayNodes], None]) -> None:
    """Without their head, Ray's nodes end, and all workers with them. A request waits until Ray is back.

    The parent is connected with the new head before the other nodes are.
    """
    async with opened(ray, writers) as on:
        first = list(on.spawner.agents.values())
        agents = {agent.node: agent.number for agent in first}
        await lose_in_flight(on.omni, "n2", lambda: kill(ray))
        with trio.fail_after(WATCHDOG_S):
            for agent in first:
                await agent.fenced.wait()
        await wait_ended(*ray.agents_and_workers())
        waiting = ask_long(on.omni)
        for node in agents:
            await trio.to_thread.run_sync(ray.end, node)
        await trio.to_thread.run_sync(ray.restart, ["head"])
        await on.until_connected()
        await trio.to_thread.run_sync(ray.restart, list(agents))
        with trio.fail_after(2 * WATCHDOG_S):  # an agent whose start Ray has lost is given up after a minute
            check_exact(waiting, [output async for output in waiting])
        for node, number in agents.items():
            await on.until_back(node, number)
        await check_served(on.omni)
        assert_one_writer_at_a_time(writers)


@pytest.mark.exhaustive
@pytest.mark.timeout(900)
@pytest.mark.parametrize("lost", PARTITIONS.values(), ids=PARTITIONS)
async def test_a_partition_of_five_minutes(ray: RayNodes, writers: Path, lost: Mapping[str, Sequence[str]]) -> None:
    """Ray takes the node for dead, and its raylet ends. Whatever keeps Ray running on a node starts it there again."""
    async with opened(ray, writers, lease_s=LEASE_S) as on:
        agent, began, answers = on.spawner.agents["n2"].number, trio.current_time(), 0
        with partition(ray, lost):
            while trio.current_time() < began + 300.0:
                check_exact(generation := ask_long(on.omni), await read(generation))
                answers += 1
                await trio.sleep(2.0)
            assert ray.node_of(pid_of(on.omni, "second")) == "n1"
            assert not ray.agents_and_workers() & ray.nodes["n2"].pids()
        ended = await trio.to_thread.run_sync(ray.restart_ended)
        print(f"{answers} answers; Ray's nodes that had ended: {ended}")
        await on.until_back("n2", agent)
        os.kill(pid_of(on.omni, "second"), signal.SIGKILL)
        await wait_restarted(on.omni, "second", 3)
        await check_served(on.omni)
        assert ray.node_of(pid_of(on.omni, "second")) == "n2"
        assert_one_writer_at_a_time(writers)
