"""A system whose cluster has a node on which no agent can be started: it starts without it, if it can."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio
from msgspec import structs

from omni_actors import OmniSystem
from omni_actors.cluster import remote_agents
from omni_actors.cluster.agent import AgentSettings
from omni_actors.cluster.interfaces import AgentEnd
from omni_actors.cluster.on_ray import plan_again
from omni_actors.cluster.placement import PARENT, Node
from omni_actors.cluster.placements import Placements
from omni_actors.cluster.spawner import ClusterSpawner, open_cluster
from omni_actors.cluster.subprocess_agents import SubprocessAgents
from omni_actors.config import Cluster
from omni_actors.errors import ClusterUnavailable, NoPlace
from omni_actors.log_events import NodeLeftOut
from tests.cluster.long_answers import ask_long, check_exact, long_answers
from tests.support.echo_systems import read, until

NODES = [Node(name="here", labels=(PARENT,)), *(Node(name=name, labels=("work", name)) for name in ("a", "b"))]
"""Each has one CPU, so the two stages have one node each."""
FAILS = [sys.executable, "-c", "import sys; sys.exit(1)"]


class FailsAtFirst(SubprocessAgents):
    """The first agent of the node "b" cannot be started, and the next one not before ``is_open``."""

    def __init__(self) -> None:
        super().__init__({"b": FAILS})
        self.is_open = trio.Event()

    async def run(self, node: str, settings: AgentSettings) -> AgentEnd:
        if node in self.pids:
            await self.is_open.wait()
            self._commands = {}
        return await super().run(node, settings)


@asynccontextmanager
async def opened(starter: SubprocessAgents, *, first: str = "work", second: str = "work") -> AsyncIterator[OmniSystem]:
    """Open a system whose stages need nodes with these labels. Without losses, the first one is on "a"."""
    pipeline = structs.replace(long_answers(), cluster=Cluster(nodes={"first": first, "second": second}))
    places = Placements(pipeline, NODES)
    places.plan()
    async with (
        open_cluster(NODES, starter, places, replan=lambda: plan_again(pipeline, places)) as cluster,
        OmniSystem.open(pipeline, spawner=cluster) as omni,
    ):
        yield omni


def left_out(caplog: pytest.LogCaptureFixture) -> dict[str, str]:
    events = [record.__dict__.get("event") for record in caplog.records]
    return {event.node: event.reason for event in events if isinstance(event, NodeLeftOut)}


async def test_a_system_starts_without_a_node_that_it_can_do_without(caplog: pytest.LogCaptureFixture) -> None:
    async with opened(SubprocessAgents({"b": FAILS})) as omni:
        health = omni.health()
        assert {stage: each[0].node for stage, each in health.stages.items()} == {"first": "a", "second": "a"}
        assert left_out(caplog) == {"b": "its agent has ended: exit code 1"}
        assert health.nodes["b"].why == "its agent has ended: exit code 1"
        check_exact(generation := ask_long(omni), await read(generation))


async def test_a_node_that_was_missing_at_the_start_is_used_once_it_has_an_agent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(remote_agents, "RESTART_S", (0.1, 0.1))
    async with opened(starter := FailsAtFirst()) as omni:
        starter.is_open.set()
        await until(lambda: omni.health().nodes["b"].state == "alive")
        await omni.scale("second", 2)
        assert omni.health().stages["second"][1].node == "b"


async def test_a_system_that_needs_the_missing_node_is_not_opened(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ClusterUnavailable, match=r"'b'.*exit code 1") as caught:
        async with opened(SubprocessAgents({"b": FAILS}), second="b"):
            pytest.fail("the block began")
    assert list(caught.value.nodes) == ["b"]
    assert isinstance(caught.value.__cause__, NoPlace)
    assert caught.value.__cause__.stage == "second"
    assert not left_out(caplog)


async def test_all_nodes_but_the_parents_may_be_missing() -> None:
    async with opened(SubprocessAgents({"a": FAILS, "b": FAILS}), first=PARENT, second=PARENT) as omni:
        check_exact(generation := ask_long(omni), await read(generation))


async def test_a_node_that_is_added_and_has_no_agent_can_be_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_agents, "RESTART_S", (0.1, 0.1))
    async with opened(starter := SubprocessAgents({"c": FAILS})) as omni:
        cluster = omni._cluster
        assert isinstance(cluster, ClusterSpawner)
        cluster.add(Node(name="c", labels=("work",)))
        await until(lambda: omni.health().nodes["c"].state == "fenced")
        assert cluster.remove("c")
        assert "c" not in omni.health().nodes
        last = starter.pids["c"]
        cluster.add(Node(name="c", labels=("work",)))  # it has one agent at a time, the new one's
        await until(lambda: starter.pids["c"] != last)
        assert not cluster.remove("a")
        check_exact(generation := ask_long(omni), await read(generation))


class NotStarted(SubprocessAgents):
    """On the node "b" no agent is started, and it is not certain that none runs there."""

    async def run(self, node: str, settings: AgentSettings) -> AgentEnd:
        return AgentEnd(False, "no actor") if node == "b" else await super().run(node, settings)


async def test_an_agent_that_has_never_run_is_not_said_to_be_out_of_reach() -> None:
    async with opened(NotStarted()) as omni:
        assert omni.health().nodes["b"].why == "its agent cannot be started: no actor"
