"""Calls that need what workers on other nodes do not have: the memory and the folders of the parent's machine.

The nodes of these tests share both with the parent. So the tests look at what a worker is asked for, not at whether it
could.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
import trio
from safetensors.numpy import save_file

from omni_actors import OmniSystem, Pipeline
from omni_actors.cluster.placement import Place
from omni_actors.cluster.spawner import open_cluster
from omni_actors.cluster.subprocess_agents import SubprocessAgents
from omni_actors.config import Cluster, Stage
from omni_actors.errors import InvalidRequest, OmniError, Unsupported
from omni_actors.protocol.messages import Address
from tests.cluster.subprocess_cluster import FixedPlaces, named, open_on_nodes
from tests.support.controllable_engine import FACTORY
from tests.support.echo_systems import WATCHDOG_S
from tests.support.open_descriptors import weights_in_memory

TENSORS = {"unused": np.zeros(2, np.float32)}


@asynccontextmanager
async def opened(nodes: Mapping[str, str], cluster: Cluster | None = None) -> AsyncIterator[OmniSystem]:
    """nodes: the node of each stage."""
    with trio.fail_after(WATCHDOG_S):
        stages = {name: Stage(engine=FACTORY, accepts=("script",), emits=name) for name in nodes}
        pipeline = Pipeline(name="controlled", stages=stages, cluster=cluster)
        async with open_on_nodes(pipeline, nodes) as running:
            yield running.omni


async def test_tensors_are_refused_for_workers_on_other_nodes_before_any_worker_has_them(tmp_path: Path) -> None:
    async with opened({"here": "parent", "there": "a"}) as omni:
        for stages in (("there",), ("here", "there")):
            with pytest.raises(InvalidRequest, match=r"'there'.*file that every node has") as refused:
                await omni.update_weights(TENSORS, version="1", stages=stages)
            assert (refused.value.param, refused.value.code) == ("path", "other_nodes")
        assert await omni.get_weight_version() == {"here": "0", "there": "0"}
        assert weights_in_memory() == []
        assert not await omni.is_paused()
        await omni.update_weights(TENSORS, version="1", stages=("here",))
        save_file(TENSORS, file := tmp_path / "2.safetensors")
        await omni.update_weights(file, version="2", stages=("there",))
        assert await omni.get_weight_version() == {"here": "1", "there": "2"}


async def test_tensors_are_refused_for_workers_that_may_move_to_another_node() -> None:
    cluster = Cluster(nodes={"bound": "parent"}, colocate=(("bound", "beside"),))
    async with opened({"bound": "parent", "beside": "parent", "free": "parent"}, cluster) as omni:
        with pytest.raises(InvalidRequest, match="'free' may run on other nodes"):
            await omni.update_weights(TENSORS, version="1", stages=("free",))
        await omni.update_weights(TENSORS, version="1", stages=("bound", "beside"))
        assert await omni.get_weight_version() == {"bound": "1", "beside": "1", "free": "0"}


def check_left_out(error: OmniError | None) -> None:
    assert isinstance(error, Unsupported)
    assert error.capability == "start_profile"
    assert error.why == "its worker runs on the node 'a', and profiles cover the parent's node only"


async def test_a_worker_on_another_node_is_not_profiled_and_the_reply_says_so(tmp_path: Path) -> None:
    async with opened({"here": "parent", "there": "a"}) as omni:
        replies = await omni.start_profile()
        check_left_out(replies["there"][0].error)
        [here] = replies["here"]
        assert isinstance(here.error, Unsupported)
        assert "torch" in here.error.why
        profile = await omni.stop_profile(tmp_path / "profile.json")
        assert profile.replies == {}


class ByNumber(FixedPlaces):
    """The nodes are those of workers, as in "mind.0"."""

    def find(self, address: Address) -> Place:
        return super().find(Address(str(address), 0))


@pytest.mark.slow
async def test_a_profile_has_the_replica_on_the_parents_node(tmp_path: Path) -> None:
    stage = Stage(engine="tests.test_profiling:Multiplying", accepts=("script",), emits="text", replicas=2)
    pipeline, places = Pipeline(name="mind", stages={"mind": stage}), ByNumber({"mind.0": "parent", "mind.1": "a"})
    with trio.fail_after(WATCHDOG_S):
        async with (
            open_cluster(named("a"), SubprocessAgents(), places) as spawner,
            OmniSystem.open(pipeline, spawner=spawner) as omni,
        ):
            here, there = (await omni.start_profile())["mind"]
            assert here.error is None
            check_left_out(there.error)
            profile = await omni.stop_profile(tmp_path / "profile.json")
            here, there = profile.replies["mind"]
            assert here.error is None
            check_left_out(there.error)
    events = json.loads(profile.path.read_text())["traceEvents"]
    names = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert "mind.0" in names
    assert "mind.1" not in names
