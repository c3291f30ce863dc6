"""What operators see of nodes: in health, metrics, the live state, traces, errors and the log."""

from __future__ import annotations

import os
import signal
import time

import msgspec
import pytest
import trio
from opentelemetry.sdk.trace import ReadableSpan
from prometheus_client.parser import text_string_to_metric_families

from omni_actors import OmniSystem
from omni_actors.cluster.agent import AgentSettings
from omni_actors.cluster.interfaces import AgentEnd
from omni_actors.cluster.spawner import open_cluster
from omni_actors.cluster.subprocess_agents import SubprocessAgents
from omni_actors.errors import StageCrashed
from omni_actors.serve.routes.status import overall_status
from omni_actors.system import LiveState
from tests.cluster.long_answers import OUTPUTS, PAYLOAD_BYTES, ask_long, long_answers
from tests.cluster.subprocess_cluster import FixedPlaces, named, open_on_nodes
from tests.support.echo_systems import ask, pid_of, read, until, wait_restarted
from tests.support.spans import Spans, facts

NODES = {"first": "a", "second": "parent"}
LINKS = {"client.0>first.0": ("parent", "a"), "first.0>second.0": ("a", "parent"), "first.0>client.0": ("a", "parent")}
LEASE_S = 6.0


class UncertainAgents(SubprocessAgents):
    """Nobody knows whether an agent that cannot be reached has ended, as on another machine."""

    async def run(self, node: str, settings: AgentSettings) -> AgentEnd:
        return AgentEnd(False, (await super().run(node, settings)).why)


LINK_LABELS = ("producer", "consumer", "from_node", "to_node")


class UnheardAgents(SubprocessAgents):
    """The parent learns that an agent has ended only once ``is_known`` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.is_known = trio.Event()

    async def run(self, node: str, settings: AgentSettings) -> AgentEnd:
        end = await super().run(node, settings)
        await self.is_known.wait()
        return end


def samples(omni: OmniSystem, name: str, *labels: str) -> dict[tuple[str, ...], float]:
    """Return the values of a metric by the values of these labels."""
    families = text_string_to_metric_families(omni.metrics.exposition().decode())
    found = [sample for family in families for sample in family.samples if sample.name == name]
    return {tuple(sample.labels[label] for label in labels): sample.value for sample in found}


def counts(state: LiveState) -> tuple[int, int]:
    """Return how many messages the link between the stages has carried, and the bytes that wait in it."""
    spoken = state.links["first.0>second.0"]
    return spoken.messages, spoken.waiting_bytes


async def test_health_metrics_and_the_live_state_name_nodes_and_links() -> None:
    async with open_on_nodes(long_answers(), NODES) as cluster:
        omni = cluster.omni
        await read(ask_long(omni))
        health = omni.health()
        assert {stage: each[0].node for stage, each in health.stages.items()} == NODES
        assert [(name, node.state, node.parent) for name, node in health.nodes.items()] == [
            ("parent", "alive", True),
            ("a", "alive", False),
        ]
        assert health.nodes["a"].agent_pid == cluster.agents.pids["a"]
        assert 0 < (health.nodes["a"].lease_left_s or 0) <= 10

        # Counted on the other node, which reports it now and then.
        await until(lambda: omni.live_state().links["client.0>first.0"].messages > 0)
        await until(lambda: counts(omni.live_state()) == (OUTPUTS, 0))
        state = msgspec.convert(msgspec.to_builtins(omni.live_state()), LiveState)
        assert {name: (link.from_node, link.to_node) for name, link in state.links.items()} == LINKS
        assert counts(state) == (OUTPUTS, 0)
        spoken = state.links["first.0>second.0"]
        assert spoken.payload_bytes > OUTPUTS * PAYLOAD_BYTES
        assert {name: node.state for name, node in state.nodes.items()} == {"parent": "alive", "a": "alive"}
        assert state.stages["first"].replicas["0"].node == "a"

        assert samples(omni, "omni_node_alive", "node") == {("parent",): 1, ("a",): 1}
        runs_on = samples(omni, "omni_stage_node", "stage", "replica", "node")
        assert runs_on == {("first", "0", "a"): 1, ("second", "0", "parent"): 1}
        crossed = samples(omni, "omni_link_payload_bytes", *LINK_LABELS)
        assert crossed["first.0", "second.0", "a", "parent"] == spoken.payload_bytes
        assert crossed.keys() == samples(omni, "omni_link_waiting_bytes", *LINK_LABELS).keys()
        assert len(crossed) == len(LINKS)


async def test_a_replica_is_down_as_soon_as_its_node_is_given_up() -> None:
    """Its worker may still run: it counts as dead only when the node is fenced."""
    agents = UnheardAgents()
    async with (
        open_cluster(named("a"), agents, FixedPlaces(NODES)) as spawner,
        OmniSystem.open(long_answers(), spawner=spawner) as omni,
    ):

        def shown() -> tuple[str, float | None]:
            replica = omni.live_state().stages["first"].replicas["0"]
            return replica.state, replica.down_since

        await omni.wait_ready()
        assert shown() == ("ready", None)
        os.kill(agents.pids["a"], signal.SIGKILL)
        await until(lambda: omni.health().nodes["a"].state != "alive" and not omni.health().ready)
        health = omni.health()
        assert health.nodes["a"].state == "lost", "it is not fenced yet"
        assert overall_status(health) == "restarting"
        assert samples(omni, "omni_stage_ready", "stage") == {("first",): 0, ("second",): 1}
        assert samples(omni, "omni_stage_replicas_ready", "stage") == {("first",): 0, ("second",): 1}
        assert not omni.live_state().ready
        state, since = shown()
        assert state == "restarting"
        assert since is not None
        assert health.nodes["a"].since - 0.1 < since < time.time() + 0.1
        assert health.stages["first"][0].note == f"NodeLost: a: {health.nodes['a'].why}"
        assert health.stages["first"][0].history == []

        agents.is_known.set()
        await until(lambda: len(omni.health().stages["first"][0].history) == 1)
        assert shown() == ("restarting", since)
        await wait_restarted(omni, "first", 2)
        assert shown() == ("ready", None)


@pytest.mark.slow
async def test_the_state_of_a_node_follows_the_loss_of_its_agent() -> None:
    """It is lost until its lease has ended, and fenced until it has a new agent."""
    agents, seen = UncertainAgents(), list[str]()
    async with (
        open_cluster(named("a"), agents, FixedPlaces(NODES), lease_s=LEASE_S) as spawner,
        OmniSystem.open(long_answers(), spawner=spawner) as omni,
    ):

        def is_back() -> bool:
            node = omni.health().nodes["a"]
            if node.state not in seen[-1:]:
                seen.append(node.state)
                assert (node.why is None) == (node.state == "alive"), node
                assert (node.lease_left_s is None) == (node.state in ("fenced", "starting")), node
            return node.state == "alive" and len(seen) > 1

        before = omni.health().nodes["a"]
        is_back()
        os.kill(agents.pids["a"], signal.SIGKILL)
        await until(is_back)
        after = omni.health().nodes["a"]
        assert seen == ["alive", "lost", "fenced", "starting", "alive"]
        assert after.since > before.since
        assert after.agent_pid != before.agent_pid
        await wait_restarted(omni, "first", 2)


async def test_a_death_names_the_node_in_the_error_the_log_and_the_history(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "omni_actors.log_events")
    async with open_on_nodes(long_answers(), NODES) as cluster:
        for stage, node in NODES.items():
            pid = pid_of(cluster.omni, stage)
            with pytest.raises(StageCrashed, match=f"pid {pid} on node {node} exited with code 3") as caught:
                await read(ask(cluster.omni, stage=stage, stderr=f"the last words of {stage}", exit=3))
            assert caught.value.exit.node == node
            assert caught.value.stderr_tail[-1] == f"the last words of {stage}"
            await wait_restarted(cluster.omni, stage, 2)
            [past] = cluster.omni.health().stages[stage][0].history
            assert past.node == node
    events = [record.__dict__["event"] for record in caplog.records if hasattr(record, "event")]
    assert {(event.stage, event.node) for event in events} == set(NODES.items())


async def test_spans_of_stages_have_the_node() -> None:
    spans = Spans()
    agents = SubprocessAgents()
    async with (
        open_cluster(named("a"), agents, FixedPlaces(NODES)) as spawner,
        OmniSystem.open(long_answers(), spawner=spawner, tracer_provider=spans.provider) as omni,
    ):
        await read(ask_long(omni))
    trace = spans.take()
    nodes = {stage: [node_of(span) for span in trace.named(f"stage {stage}")] for stage in NODES}
    assert nodes == {stage: [node] for stage, node in NODES.items()}


def node_of(span: ReadableSpan) -> object:
    return facts(span).get("omni_actors.node")
