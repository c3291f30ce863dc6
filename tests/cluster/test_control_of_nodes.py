"""Calls that need what workers on other nodes do not have: the memory and the folders of the parent's machine.

The nodes of these tests share both with the parent. So the tests look at what a worker is asked for, not at whether it
could.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
import trio
from safetensors.numpy import save_file

from omni_actors import OmniSystem, Pipeline
from omni_actors.config import Cluster, Stage
from omni_actors.errors import InvalidRequest
from tests.cluster.subprocess_cluster import open_on_nodes
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
