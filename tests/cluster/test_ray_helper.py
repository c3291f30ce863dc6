"""A helper that ends, or hangs: the next agent gets a new one. A script takes the place of Ray."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import psutil
import pytest
import trio
import trio.testing

from omni_actors.cluster import ray_nodes
from omni_actors.cluster.agent import AgentSettings
from omni_actors.cluster.ray_messages import Obeyed, RayNode, Started
from omni_actors.cluster.ray_nodes import open_ray
from omni_actors.errors import ClusterUnavailable

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


async def test_a_helper_that_carries_out_no_order_is_killed_and_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script, starts = tmp_path / "helper", tmp_path / "starts"
    news = msgspec.json.encode(Started([NODE])).decode()
    script.write_text(f"#!/bin/sh\necho $$ >>'{starts}'\necho '{news}'\nexec sleep 1000\n")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    monkeypatch.setattr(ray_nodes, "ORDER_S", 0.2)
    monkeypatch.setattr(ray_nodes, "END_S", 0.2)
    with trio.fail_after(30):
        async with open_ray("10.0.0.1:6379") as ray:
            for number in (1, 2):
                end = await ray.run("a", settings(number))
                assert not end.certain
                assert "within 0.2 s" in end.why
        helpers = [int(pid) for pid in starts.read_text().split()]
    assert len(helpers) == 2
    assert not any(psutil.pid_exists(pid) for pid in helpers)


async def test_an_order_that_ray_refuses_ends_that_agent_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script, starts = tmp_path / "helper", tmp_path / "starts"
    news = [Started([NODE]), Obeyed("RaySystemError: no control store")]
    started, refused = (msgspec.json.encode(each).decode() for each in news)
    script.write_text(
        f"#!/bin/sh\necho $$ >>'{starts}'\necho '{started}'\nwhile read order; do echo '{refused}'; done\n"
    )
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    with trio.fail_after(30):
        async with open_ray("10.0.0.1:6379") as ray:
            for number in (1, 2):
                assert await ray.run("a", settings(number)) == (False, "RaySystemError: no control store")
        assert len(starts.read_text().split()) == 1


async def test_a_helper_that_finds_fewer_nodes_takes_none_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new head has only its own node at first; the others come later, and are still the nodes of the cluster."""
    script, starts = tmp_path / "helper", tmp_path / "starts"
    later = msgspec.structs.replace(NODE, node_id="2", name="b", is_parents=False)
    both, one = (msgspec.json.encode(Started(nodes)).decode() for nodes in ([NODE, later], [NODE]))
    script.write_text(
        f"#!/bin/sh\nif [ -e '{starts}' ]; then echo '{one}'; else echo '{both}'; fi\necho >>'{starts}'\n"
    )
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    with trio.fail_after(30):
        async with open_ray("10.0.0.1:6379") as ray:
            while not starts.exists() or len(starts.read_text()) < 2:
                await trio.sleep(0.01)
                await ray.connect()
            assert [node.name for node in ray.nodes] == ["a", "b"]


async def test_a_helper_that_says_what_cannot_be_read_is_killed_and_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script, starts = tmp_path / "helper", tmp_path / "starts"
    news = msgspec.json.encode(Started([NODE])).decode()
    script.write_text(f"#!/bin/sh\necho $$ >>'{starts}'\necho '{news}'\nread order\necho oops\nexec sleep 1000\n")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    with trio.fail_after(30):
        async with open_ray("10.0.0.1:6379") as ray:
            for number in (1, 2):
                end = await ray.run("a", settings(number))
                assert end == (False, "the helper that uses Ray has ended")
        helpers = [int(pid) for pid in starts.read_text().split()]
    assert len(helpers) == 2
    assert not any(psutil.pid_exists(pid) for pid in helpers)


async def test_a_helper_whose_first_words_cannot_be_read_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "helper"
    script.write_text("#!/bin/sh\necho oops\nexec sleep 1000\n")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    with trio.fail_after(30), pytest.raises(ClusterUnavailable, match="the helper says what cannot be read"):
        async with open_ray("10.0.0.1:6379"):
            pytest.fail("the block began")


async def test_no_node_has_the_name_of_the_parents_label(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "helper"
    named = [msgspec.structs.replace(NODE, node_id=name, name=name) for name in ("a", "parent", "parent-2")]
    script.write_text(f"#!/bin/sh\necho '{msgspec.json.encode(Started(named)).decode()}'\nread end\n")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    with trio.fail_after(30):
        async with open_ray("10.0.0.1:6379") as ray:
            assert {node.name: node.node_id for node in ray.nodes} == {
                "a": "a",
                "parent-2": "parent",
                "parent-2-2": "parent-2",
            }


async def test_the_helper_outlives_a_cancelled_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that agents that are killed when the block ends are killed by it."""
    script = tmp_path / "helper"
    news, obeyed = (msgspec.json.encode(each).decode() for each in (Started([NODE]), Obeyed("as asked")))
    script.write_text(f"#!/bin/sh\necho '{news}'\nwhile read order; do echo '{obeyed}'; done\n")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    ends = []
    with trio.fail_after(30), trio.CancelScope() as scope:
        async with open_ray("10.0.0.1:6379") as ray:
            scope.cancel()
            try:
                await trio.sleep_forever()
            finally:
                with trio.CancelScope(shield=True):
                    await trio.testing.wait_all_tasks_blocked()
                    ends.append(await ray.run("a", settings(1)))
    assert ends == [(False, "as asked")]


def settings(number: int) -> AgentSettings:
    return AgentSettings(
        number=number, parent=("127.0.0.1", 1), secret=bytes(32), lease_s=1.0, tls=None, import_path=()
    )
