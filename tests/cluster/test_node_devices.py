"""Devices of workers on several nodes: those of the node, and not those of the parent's machine."""

from __future__ import annotations

import os
import signal

import msgspec
import psutil
import pytest
import trio

from omni_actors import OmniSystem
from omni_actors.cluster.on_ray import open_on_ray
from omni_actors.cluster.placement import PARENT, Node
from omni_actors.cluster.placements import Placements
from omni_actors.cluster.spawner import open_cluster
from omni_actors.cluster.subprocess_agents import SubprocessAgents
from omni_actors.config import Cluster, Pipeline, Stage
from omni_actors.errors import ConfigError, InvalidRequest
from omni_actors.platform.device_locks import DeviceLocks
from omni_actors.protocol.messages import Address
from tests.cluster.held_agents import HeldAgents
from tests.support.echo_systems import WATCHDOG_S, until

NODES = [
    Node(name=PARENT, gpus=1),
    Node(name="a", labels=("gpu",), gpus=1),
    Node(name="b", labels=("gpu",), gpus=2),
]
SEEN = {
    "a": ("env", "CUDA_VISIBLE_DEVICES=3"),
    "b": ("env", "CUDA_VISIBLE_DEVICES=4,GPU-6"),
}
"""The devices that the agent of each node sees: those that it was given of more."""


@pytest.fixture(autouse=True)
def one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The parent sees one device."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")


def pipeline(replicas: int = 2) -> Pipeline:
    """Workers on nodes with the label "gpu", each with a device."""
    stage = Stage(
        engine="tests.cluster.device_engine:without_devices",
        accepts=("script",),
        emits="audio",
        device="cuda",
        replicas=replicas,
        device_lock_timeout_s=0.05,
    )
    return Pipeline(name="devices", stages={"only": stage}, cluster=Cluster(nodes={"only": "gpu"}))


async def test_workers_get_the_devices_of_their_nodes_whatever_the_parent_has() -> None:
    """Another program loads onto the parent's device of the same name, which concerns no other node."""
    locks, configured = DeviceLocks(), pipeline()
    await locks.acquire(["0"], 10.0)
    try:
        async with (
            open_cluster(NODES, SubprocessAgents(SEEN), Placements(configured, NODES)) as spawner,
            OmniSystem.open(configured, spawner=spawner) as omni,
        ):
            await omni.scale("only", 3)
            nodes = {agent.pid: node for node, agent in spawner.agents.items()}
            workers = [psutil.Process(each.pid) for each in omni.health().stages["only"] if each.pid]
            found = [(nodes[each.ppid()], each.environ()["CUDA_VISIBLE_DEVICES"]) for each in workers]
            assert sorted(found) == [("a", "3"), ("b", "4"), ("b", "GPU-6")]
            shown = [(each.node, each.devices) for each in omni.health().stages["only"]]
            assert sorted(shown) == [("a", ("0",)), ("b", ("0",)), ("b", ("1",))]
    finally:
        locks.release()


async def test_a_stage_is_scaled_as_far_as_nodes_have_room() -> None:
    """It fails beyond that, and changes and sleeps as ever afterwards."""
    configured = pipeline()
    places = Placements(configured, NODES)
    with trio.fail_after(WATCHDOG_S):
        async with (
            open_cluster(NODES, SubprocessAgents(SEEN), places) as spawner,
            OmniSystem.open(configured, spawner=spawner) as omni,
        ):
            await omni.wait_ready()
            with pytest.raises(InvalidRequest, match="a, b: it has no devices for another worker of 'only'") as caught:
                await omni.scale("only", 4)  # there is room for one of the two
            assert (caught.value.param, caught.value.code) == ("replicas", "no_devices")
            assert [each.state for each in omni.health().stages["only"]] == ["ready"] * 3
            with pytest.raises(InvalidRequest, match=r"no node can run only\.[23]"):  # either of them had the place
                await omni.scale("only", 4)
            assert (await omni.scale("only", 2)).before == 3
            await omni.sleep(2)
            await omni.wake_up()


async def test_a_replica_whose_node_is_lost_before_it_is_ready_is_taken_back() -> None:
    """No other node has room for it. The stage changes and sleeps as ever afterwards."""
    configured, agents = pipeline(replicas=1), HeldAgents(SEEN)
    places = Placements(configured, NODES)
    with trio.fail_after(WATCHDOG_S):
        async with (
            open_cluster(NODES, agents, places) as spawner,
            OmniSystem.open(configured, spawner=spawner) as omni,
            trio.open_nursery() as nursery,
        ):
            await omni.wait_ready()
            [first] = omni.health().stages["only"]
            assert first.node == "a"

            async def scale() -> None:
                with pytest.raises(InvalidRequest, match="b: it is lost") as caught:
                    await omni.scale("only", 2)
                assert (caught.value.param, caught.value.code) == ("replicas", "no_devices")
                assert omni.health().stages["only"] == [first]
                assert (await omni.scale("only", 1)).before == 1
                await omni.sleep(2)
                await omni.wake_up()
                agents.may_return.set()
                await until(lambda: omni.health().nodes["b"].state == "alive")
                await omni.scale("only", 2)

            os.kill(agents.pids["b"], signal.SIGSTOP)  # it starts no worker
            nursery.start_soon(scale)
            await until(lambda: places.of(Address("only", 1)) is not None)
            agents.kill("b")


async def test_a_worker_is_not_started_on_a_device_that_its_agent_does_not_see(
    caplog: pytest.LogCaptureFixture,
) -> None:
    configured = pipeline()
    agents = SubprocessAgents(SEEN | {"b": ("env", "CUDA_VISIBLE_DEVICES=4")})
    places = Placements(configured, NODES)
    async with (
        open_cluster(NODES, agents, places) as spawner,
        OmniSystem.open(configured, spawner=spawner, overrides={"stages.only.replicas": 3}) as omni,
    ):
        states = {each.replica: each.state for each in omni.health().stages["only"]}
        assert states == {0: "ready", 1: "ready", 2: "failed"}
    assert "there is no device 1: the process that starts the worker sees ['4']" in caplog.text


async def test_on_one_machine_the_section_cluster_has_no_effect() -> None:
    with pytest.raises(ConfigError, match="only 1 devices are visible"):
        async with OmniSystem.open(pipeline()):
            pytest.fail("the block began")


async def test_a_cluster_takes_no_pipeline_that_passes_tensors_by_handle() -> None:
    passing = msgspec.structs.replace(pipeline(), device_handles="cuda", file="it.yaml")
    with pytest.raises(ConfigError, match="device_handles") as refused:
        async with open_on_ray(passing, "auto"):
            pytest.fail("it was opened")
    assert refused.value.accepted.startswith('"none"')
