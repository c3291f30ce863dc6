"""A helper that ends: the next agent gets a new one. A script takes the place of Ray."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import pytest
import trio

from omni_actors.cluster.ray_messages import RayNode, Started
from omni_actors.cluster.ray_nodes import open_ray

NODE = RayNode(node_id="1", name="a", address="127.0.0.1", cpus=1.0, gpus=0, free_gpus=0, labels=(), is_parents=True)


async def test_a_helper_that_ends_at_once_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script, starts = tmp_path / "helper", tmp_path / "starts"
    news = msgspec.json.encode(Started([NODE])).decode()
    script.write_text(f"#!/bin/sh\necho x >>'{starts}'\necho '{news}'\n")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    with trio.fail_after(30):
        async with open_ray("10.0.0.1:6379") as ray:
            assert [node.name for node in ray.nodes] == ["a"]
            while len(starts.read_text().split()) < 3:
                await trio.sleep(0.01)
                await ray.connect()
