"""Systems on several nodes: real agents, workers, links and signals, on this machine."""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import psutil
import pytest
import trio
from msgspec import structs

from omni_actors import OmniSystem
from omni_actors.cluster import remote_agent
from omni_actors.cluster.agent import AgentSettings
from omni_actors.cluster.interfaces import AgentEnd
from omni_actors.cluster.spawner import open_cluster
from omni_actors.cluster.strangers import MOST_STRANGERS
from omni_actors.cluster.subprocess_agents import SubprocessAgents
from omni_actors.errors import ClusterUnavailable, StageCrashed
from omni_actors.log_events import NodeLost
from omni_actors.stress import cuts
from tests.cluster.long_answers import (
    ask_long,
    assert_one_writer_at_a_time,
    check_exact,
    check_served,
    has_ended,
    long_answers,
    lose_in_flight,
    read_until_first,
    with_frail,
)
from tests.cluster.subprocess_cluster import FixedPlaces, named, open_on_nodes
from tests.support.echo_systems import WATCHDOG_S, ask, pid_of, read, until, wait_restarted
from tests.support.network import Forwarder

LAYOUTS = {
    "two nodes": {"first": "a", "second": "b"},
    "one node": {"first": "a", "second": "a"},
    "parent and node": {"first": "parent", "second": "b"},
    "node and parent": {"first": "a", "second": "parent"},
}
LEASE_S = 6.0
"""Short, because some tests wait for its end, and long enough for a process of a busy machine that stands still."""


@pytest.fixture
def writers(tmp_path: Path) -> Path:
    """Where the workers log their lives."""
    return tmp_path / "writers"


@pytest.mark.parametrize(
    "layout", ["two nodes", *(pytest.param(each, marks=pytest.mark.slow) for each in LAYOUTS if each != "two nodes")]
)
async def test_answers_cross_nodes_whole_and_in_order(layout: str) -> None:
    async with open_on_nodes(long_answers(), LAYOUTS[layout]) as cluster:
        omni = cluster.omni
        generations = [ask_long(omni) for _ in range(4)]
        for generation in generations:
            check_exact(generation, await read(generation))
        assert len(omni._edges.statistics()) == 4
        # The counters of rings between workers come with the agent's next report (``REPORT_S``).
        await until(lambda: all(ring.messages >= 4 for ring in omni._edges.statistics().values()))


@pytest.mark.slow
async def test_a_request_goes_on_after_the_death_of_a_worker_on_another_node(
    writers: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_on_nodes(long_answers(writers), LAYOUTS["two nodes"]) as cluster:
        for stage in ("first", "second"):
            generation, pid = ask_long(cluster.omni), pid_of(cluster.omni, stage)
            outputs = await read_until_first(generation, lambda pid=pid: os.kill(pid, signal.SIGKILL))
            check_exact(generation, outputs)
            await wait_restarted(cluster.omni, stage, 2)
        [death] = cluster.omni.health().stages["first"][0].history
        assert death.signal == "SIGKILL"
        assert assert_one_writer_at_a_time(writers) == 4
    assert not losses(caplog), "neither a death of a worker nor the end of the system is the loss of a node"


def losses(caplog: pytest.LogCaptureFixture) -> list[NodeLost]:
    events = [record.__dict__.get("event") for record in caplog.records]
    return [event for event in events if isinstance(event, NodeLost)]


@pytest.mark.parametrize("node", ["a", pytest.param("b", marks=pytest.mark.slow)])
async def test_a_request_goes_on_after_the_death_of_an_agent(
    writers: Path, node: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Its workers die with it. The process is a child of this one, so its end is certain and no lease is waited for."""
    async with open_on_nodes(long_answers(writers), LAYOUTS["two nodes"], lease_s=60) as cluster:
        stage = {"a": "first", "b": "second"}[node]
        worker = psutil.Process(pid_of(cluster.omni, stage))
        generation = ask_long(cluster.omni)
        outputs = await read_until_first(generation, lambda: os.kill(cluster.agents.pids[node], signal.SIGKILL))
        check_exact(generation, outputs)
        await wait_restarted(cluster.omni, stage, 2)  # the answer may have been complete before the death
        assert has_ended(worker)
        [death] = cluster.omni.health().stages[stage][0].history
        assert death.reason is not None
        assert f"NodeLost: {node}" in death.reason
        [lost] = losses(caplog)
        assert (lost.node, lost.workers) == (node, 1)
        assert 0 <= lost.fenced_in_s <= 67
        assert_one_writer_at_a_time(writers)


class UnreachableAgents(SubprocessAgents):
    """Agents on nodes that cannot be reached once they are given up: nothing kills them from outside.

    lines: what the connections between a node's agent and the parent go through.
    """

    def __init__(self) -> None:
        super().__init__()
        self.lines: dict[str, Forwarder] = {}

    async def run(self, node: str, settings: AgentSettings) -> AgentEnd:
        with Forwarder(settings.parent) as line:
            self.lines[node] = line
            await self._run_until_lost(node, structs.replace(settings, parent=line.address))
        raise AssertionError

    async def _run_until_lost(self, node: str, settings: AgentSettings) -> None:
        async with trio.open_nursery() as nursery:
            running = trio.CancelScope(shield=True)
            try:
                nursery.start_soon(self._run_shielded, running, node, settings)
                await trio.sleep_forever()
            finally:
                with trio.CancelScope(shield=True):
                    await trio.sleep(LEASE_S)  # the agent is on its own for longer than its lease
                running.cancel()

    async def _run_shielded(self, scope: trio.CancelScope, node: str, settings: AgentSettings) -> None:
        with scope:
            await super().run(node, settings)


@asynccontextmanager
async def open_on_unreachable(writers: Path) -> AsyncIterator[tuple[OmniSystem, psutil.Process, Forwarder]]:
    """Yields the first stage's agent and its line, too. At the end, the stage must have moved to another node."""
    agents, places = UnreachableAgents(), FixedPlaces({"first": ("a", "b"), "second": "parent"})
    async with (
        open_cluster(named("a", "b"), agents, places, lease_s=LEASE_S) as spawner,
        OmniSystem.open(long_answers(writers), spawner=spawner) as omni,
    ):
        yield omni, psutil.Process(agents.pids["a"]), agents.lines["a"]
        await wait_restarted(omni, "first", 2)
        assert omni.health().stages["first"][0].node == "b"
        check_exact(after := ask_long(omni), await read(after))
        assert assert_one_writer_at_a_time(writers) == 3  # the other stage has one


@pytest.mark.slow
async def test_the_workers_of_a_node_that_stands_still_end_before_their_successors_start(writers: Path) -> None:
    """The agent alone is stopped: its worker goes on until the kernel kills both. The parent notices the silence only:
    nothing tells it that the connection has ended.
    """
    async with open_on_unreachable(writers) as (omni, agent, line):
        worker = psutil.Process(pid_of(omni, "first"))

        def stand_still() -> None:
            agent.suspend()
            line.set_stalled(True)

        check_exact(generation := ask_long(omni), await read_until_first(generation, stand_still))
        await wait_restarted(omni, "first", 2)  # the answer may have been complete before
        assert has_ended(worker)


@pytest.mark.slow
@pytest.mark.usefixtures("needs_cuts")
async def test_no_successor_starts_before_the_lease_of_a_node_that_cannot_be_reached_has_ended(writers: Path) -> None:
    """The parent gives the node up at once, as its connection is cut. The agent stands still, and kills no worker."""
    async with open_on_unreachable(writers) as (omni, agent, line):

        def cut_off() -> None:
            agent.suspend()
            assert cuts.cut(agent.pid, lambda each: each.remote_port == line.address[1]) == 1

        check_exact(generation := ask_long(omni), await read_until_first(generation, cut_off))


async def test_without_replay_a_lost_node_ends_the_request_with_the_facts() -> None:
    async with open_on_nodes(long_answers(), LAYOUTS["two nodes"]) as cluster:
        hanging = ask(cluster.omni, stage="second", hang=True)
        await until(lambda: hanging.stream.request.number is not None)
        os.kill(cluster.agents.pids["b"], signal.SIGKILL)
        with pytest.raises(StageCrashed, match="NodeLost: b"):
            await read(hanging)


async def test_a_lost_node_ends_each_request_that_can_be_neither_replayed_nor_resumed(writers: Path) -> None:
    nodes = {**LAYOUTS["two nodes"], "frail": "b"}
    async with open_on_nodes(with_frail(long_answers(writers)), nodes) as cluster:
        await lose_in_flight(cluster.omni, "b", lambda: os.kill(cluster.agents.pids["b"], signal.SIGKILL))
        await check_served(cluster.omni)
        assert_one_writer_at_a_time(writers)


async def test_a_worker_that_hangs_on_another_node_is_killed_and_its_stderr_is_kept(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "omni_actors.worker")
    async with open_on_nodes(long_answers(), LAYOUTS["one node"]) as cluster:
        dying = ask(cluster.omni, stage="first", stderr="out of luck", exit=3)
        with pytest.raises(StageCrashed) as caught:
            await read(dying)
        assert caught.value.exit_code == 3
        assert "out of luck" in caught.value.stderr_tail[-1]
        assert "out of luck" in caplog.text


async def test_an_agent_of_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_agent, "version", lambda package: "0.0.1")
    with pytest.raises(ClusterUnavailable, match=r"it runs omni-actors \S+, and the parent 0\.0\.1"):
        async with open_on_nodes(long_answers(), LAYOUTS["one node"]):
            pass


@pytest.mark.slow
async def test_strangers_are_refused_and_do_not_keep_an_agent_out() -> None:
    async with open_on_nodes(long_answers(), LAYOUTS["two nodes"]) as cluster, AsyncExitStack() as strangers:
        address = cluster.spawner.address
        for n in range(MOST_STRANGERS + 8):
            stream = await strangers.enter_async_context(await trio.open_tcp_stream(*address))
            if n % 2:
                await stream.send_all(b"GET / HTTP/1.1\r\n\r\n".ljust(56, b"\n"))
        os.kill(cluster.agents.pids["a"], signal.SIGKILL)
        await wait_restarted(cluster.omni, "first", 2)
        check_exact(after := ask_long(cluster.omni), await read(after))


async def test_an_agent_that_cannot_start_is_reported_with_its_node() -> None:
    agents = SubprocessAgents({"b": [sys.executable, "-c", "import sys; sys.exit(1)"]})
    with pytest.raises(ClusterUnavailable, match=r"'b'.*has ended") as caught:
        async with open_cluster(named("a", "b"), agents, FixedPlaces({})):
            pytest.fail("the block began")
    assert list(caught.value.nodes) == ["b"]


@pytest.mark.slow
async def test_an_agent_ends_without_a_parent(capfd: pytest.CaptureFixture[str]) -> None:
    """Its connections are accepted and nothing answers: the agent ends by itself, before the kernel kills it."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        settings = AgentSettings(number=1, parent=listener.getsockname(), secret=bytes(32), lease_s=WATCHDOG_S)
        with trio.fail_after(WATCHDOG_S):
            assert await SubprocessAgents().run("a", settings) == AgentEnd(True, "exit code 1")
    assert "has not accepted it within 30 s: the handshake took longer than 5 s" in capfd.readouterr().err
