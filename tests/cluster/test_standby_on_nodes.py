"""A standby on another node than the replica that serves: it takes over when that node is lost."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager

import psutil
import pytest
from msgspec import structs

from omni_actors import OmniSystem
from omni_actors.cluster.placement import PARENT, Node
from omni_actors.cluster.placements import Placements
from omni_actors.cluster.spawner import open_cluster
from omni_actors.config import Cluster
from omni_actors.system.health import ReplicaHealth
from tests.cluster.held_agents import HeldAgents
from tests.cluster.long_answers import ask_long, check_exact, has_ended, long_answers, read_until_first
from tests.support.echo_systems import pid_of, read, until, wait_for
from tests.support.network import Namespace, namespaces

NODES = [Node(name="here", labels=(PARENT,)), *(Node(name=name, labels=("gpu",), gpus=1) for name in ("a", "b"))]
"""Each of the others claims to have one device, so it has room for one worker of the stage "first"."""
LEASE_S = 6.0


@asynccontextmanager
async def opened(
    host: str = "127.0.0.1", commands: Mapping[str, Sequence[str]] | None = None
) -> AsyncIterator[tuple[OmniSystem, HeldAgents]]:
    """Open a system whose first stage has two workers, one on each of "a" and "b", of which one is a standby."""
    plain, agents = long_answers(), HeldAgents(commands or {})
    first = structs.replace(
        plain.stages["first"], engine="tests.cluster.device_engine:without_devices", device="cuda", standby=1
    )
    pipeline = structs.replace(
        plain, stages={**plain.stages, "first": first}, cluster=Cluster(nodes={"first": "gpu", "second": PARENT})
    )
    places = Placements(pipeline, NODES)
    places.plan()
    async with (
        open_cluster(NODES, agents, places, host=host, lease_s=LEASE_S) as cluster,
        OmniSystem.open(pipeline, spawner=cluster) as omni,
    ):
        await wait_for(omni, lambda: all(each.state == "ready" for each in omni.health().stages["first"]))
        yield omni, agents


async def check_takes_over(
    omni: OmniSystem, agents: HeldAgents, lose: Callable[[str], None], find: Callable[[], None]
) -> None:
    """lose: what loses a node. find: what makes it reachable again, before its agent may return."""

    def replicas() -> list[ReplicaHealth]:
        return omni.health().stages["first"]

    async def waits(replica: int, why: str) -> None:
        expected = f"no node can run first.{replica}: here: it does not have the label 'gpu'; {why}"
        await until(lambda: replicas()[replica].note == expected)

    serving = [each.standby for each in replicas()].index(False)  # the one that was loaded first
    served, standby = replicas()[serving], replicas()[1 - serving]
    assert served.node is not None
    assert standby.node is not None
    assert {served.node, standby.node} == {"a", "b"}
    assert standby.standby
    worker = psutil.Process(pid_of(omni, "first", serving))

    check_exact(generation := ask_long(omni), await read_until_first(generation, lambda: lose(str(served.node))))
    no_devices = f"{standby.node}: it has no devices for another worker of 'first'"
    await waits(serving, "; ".join(sorted([f"{served.node}: it is lost", no_devices])))
    assert has_ended(worker)
    check_exact(during := ask_long(omni), await read(during))
    assert structs.replace(standby, standby=False) == replicas()[1 - serving], "the same worker serves now"

    agents.kill(standby.node)
    for replica in range(2):
        await waits(replica, "a, b: it is lost")
    waiting = ask_long(omni)
    find()
    agents.may_return.set()
    check_exact(waiting, await read(waiting))
    await wait_for(omni, lambda: all(each.state == "ready" for each in replicas()))
    assert sorted(each.standby for each in replicas()) == [False, True]
    assert {each.node for each in replicas()} == {"a", "b"}


async def test_a_standby_takes_over_when_the_agent_of_the_serving_replica_is_killed() -> None:
    async with opened() as (omni, agents):
        await check_takes_over(omni, agents, agents.kill, lambda: None)


@pytest.fixture
def three() -> Iterator[list[Namespace]]:
    with namespaces(3) as nodes:
        yield nodes


@pytest.mark.slow
@pytest.mark.usefixtures("needs_namespaces")
async def test_a_standby_takes_over_when_the_node_of_the_serving_replica_is_cut_off(three: list[Namespace]) -> None:
    here, nodes = three[0], dict(zip("ab", three[1:], strict=True))
    with here.entered(), ExitStack() as cut:

        def cut_off(lost: str) -> None:
            others = [each for each in three if each is not nodes[lost]]
            for sender, receivers in ((nodes[lost], others), *((each, [nodes[lost]]) for each in others)):
                cut.enter_context(sender.muted(*receivers))

        async with opened(here.address, {name: node.command() for name, node in nodes.items()}) as (omni, agents):
            await check_takes_over(omni, agents, cut_off, cut.close)
