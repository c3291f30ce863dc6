"""Devices of workers on several nodes: those of the node, and not those of the parent's machine."""

from __future__ import annotations

import msgspec
import psutil
import pytest

from omni_actors import OmniSystem
from omni_actors.cluster.on_ray import open_on_ray
from omni_actors.cluster.placement import PARENT, Node
from omni_actors.cluster.placements import Placements
from omni_actors.cluster.spawner import open_cluster
from omni_actors.cluster.subprocess_agents import SubprocessAgents
from omni_actors.config import Cluster, Pipeline, Stage
from omni_actors.errors import ConfigError
from omni_actors.platform.device_locks import DeviceLocks

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


def pipeline() -> Pipeline:
    """Two workers on nodes with the label "gpu", each with a device."""
    stage = Stage(
        engine="tests.cluster.device_engine:without_devices",
        accepts=("script",),
        emits="audio",
        device="cuda",
        replicas=2,
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
