"""The start and the end of a system on several nodes: nodes that are lost, and ends that come from outside."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager

import pytest
import trio

from omni_actors import OmniSystem
from omni_actors.background import Background
from omni_actors.cluster import remote_agent, remote_agents
from omni_actors.cluster.agent import AgentSettings
from omni_actors.cluster.interfaces import AgentEnd
from omni_actors.cluster.spawner import open_cluster
from omni_actors.cluster.subprocess_agents import SubprocessAgents
from omni_actors.errors import ClusterUnavailable, Death
from omni_actors.protocol.messages import Address
from omni_actors.supervisor.process import PlaceLost
from tests.cluster.long_answers import ask_long, check_exact, long_answers
from tests.cluster.subprocess_cluster import FixedPlaces, named, open_on_nodes
from tests.support.echo_systems import WATCHDOG_S, read, until
from tests.support.open_descriptors import open_descriptors

LEASE_S = 6.0
"""A node that stands still for a moment keeps it."""


async def test_a_worker_whose_node_is_lost_while_it_is_started_is_started_on_another_one() -> None:
    """The agent stands still before its first worker is started, and is not known as lost yet."""
    agents, places = SubprocessAgents(), FixedPlaces({"first": ("a", "b"), "second": "parent"})
    async with open_cluster(named("a", "b"), agents, places, lease_s=LEASE_S) as cluster:
        os.kill(agents.pids["a"], signal.SIGSTOP)
        with trio.fail_after(WATCHDOG_S):
            async with OmniSystem.open(long_answers(), spawner=cluster) as omni:
                [replica] = omni.health().stages["first"]
                assert (replica.node, replica.generation) == ("b", 2)
                [death] = replica.history
                # Noticed is its silence, or that the kernel has ended it, because its lease is over by then, too.
                silence = f"it asked for no renewal of its lease for {LEASE_S:g} s"
                assert death.reason is not None
                accepted = silence, "the control connection is lost"
                assert death.reason.removeprefix("NodeLost: a: ").startswith(accepted)
                check_exact(generation := ask_long(omni), await read(generation))


async def test_a_worker_whose_place_is_gone_when_it_is_to_start_has_lost_its_node() -> None:
    places = FixedPlaces({"first": "a"})
    async with open_cluster(named(), SubprocessAgents(), places) as cluster:
        places.lose("a")
        with pytest.raises(PlaceLost, match=r"^NodeLost: "):
            async with cluster.spawn(Address("first", 0), 10):
                pytest.fail("a worker was started")


def test_a_system_of_another_thread_is_closed_before_its_agents() -> None:
    """Its workers stop as asked, and no lease is waited for."""
    histories: list[Collection[Death]] = []

    @asynccontextmanager
    async def opening() -> AsyncIterator[OmniSystem]:
        async with open_on_nodes(long_answers(), {"first": "a", "second": "parent"}, lease_s=60) as cluster:
            histories.extend(each.history for each in cluster.omni._supervisor.replicas.values())
            yield cluster.omni

    background = Background(opening)
    background.opened.result(WATCHDOG_S)
    background.stop()
    background.ended.result(WATCHDOG_S / 2)
    assert [list(each) for each in histories] == [[], []]


class FailsOnce(SubprocessAgents):
    """The first successor of an agent cannot be started, once it ``may_fail``."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.starts, self._error, self.may_fail = 0, error, trio.Event()

    async def run(self, node: str, settings: AgentSettings) -> AgentEnd:
        self.starts += 1
        if self.starts == 2:
            await self.may_fail.wait()
            raise self._error
        return await super().run(node, settings)


@pytest.mark.parametrize(
    "error", [OSError(errno.EMFILE, os.strerror(errno.EMFILE)), RuntimeError("can't start new thread")]
)
async def test_an_agent_that_cannot_be_started_for_now_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    monkeypatch.setattr(remote_agents, "RESTART_S", (0.01, 0.01))
    agents = FailsOnce(error)
    async with open_cluster(named("a"), agents, FixedPlaces({})) as cluster:
        first = cluster.agents["a"]
        os.kill(agents.pids["a"], signal.SIGKILL)
        await until(lambda: cluster.agents["a"].number == first.number + 1)
        second = cluster.agents["a"]
        agents.may_fail.set()
        await until(lambda: cluster.agents["a"].number > second.number and cluster.nodes()["a"].state == "alive")
        assert second.lost == f"its agent cannot be started: {error}"


async def test_a_node_has_places_from_the_moment_that_it_is_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_agents, "RESTART_S", (0.01, 0.01))
    agents, places = SubprocessAgents(), FixedPlaces({"first": "a"})
    async with open_cluster(named("a"), agents, places) as cluster:
        for _ in range(5):
            lost = cluster.agents["a"]
            os.kill(agents.pids["a"], signal.SIGKILL)
            await until(lambda lost=lost: cluster.agents["a"] is not lost)
            await cluster.agents["a"].up.wait()
            assert cluster.nodes()["a"].state == "alive"
            assert places.find(Address("first", 0)).node == "a"


@pytest.mark.parametrize("host", ["192.0.2.1", "0.0.0.0"])
async def test_an_address_at_which_the_parent_cannot_listen_is_named(host: str) -> None:
    before = open_descriptors()
    with pytest.raises(ClusterUnavailable, match=f"'parent'.* it cannot listen at {host}: ") as caught:
        async with open_cluster(named("a"), SubprocessAgents(), FixedPlaces({}), host=host):
            pytest.fail("the block began")
    assert list(caught.value.nodes) == ["parent"]
    assert open_descriptors() == before


def test_an_interrupt_while_the_parent_hears_an_agent_is_raised_in_the_users_task(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    handle = remote_agent.RemoteAgent._handle
    armed, caught = trio.Event(), list[str]()

    def handle_interrupted(self: remote_agent.RemoteAgent, message: remote_agent.AgentNews) -> None:
        if armed.is_set() and not caught:
            caught.append("signal")
            signal.raise_signal(signal.SIGINT)
        handle(self, message)

    async def run() -> None:
        async with open_cluster(named("a"), SubprocessAgents(), FixedPlaces({}), lease_s=LEASE_S):
            armed.set()
            try:
                await trio.sleep_forever()
            except KeyboardInterrupt:
                caught.append("user's task")
                raise

    monkeypatch.setattr(remote_agent.RemoteAgent, "_handle", handle_interrupted)
    with pytest.raises(KeyboardInterrupt):
        trio.run(run)
    assert caught == ["signal", "user's task"]


def test_settings_of_an_agent_do_not_show_the_secret() -> None:
    settings = AgentSettings(number=1, parent=("h", 1), secret=b"SECRETSECRETSECRET", lease_s=1.0)
    assert "SECRET" not in repr(settings)
