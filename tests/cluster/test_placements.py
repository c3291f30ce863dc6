"""The places of a running pipeline's workers, as nodes come and go."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import trio
import trio.testing
from msgspec import structs

from omni_actors.cluster.placement import PARENT, Node
from omni_actors.cluster.placements import Placements
from omni_actors.config import Cluster, Pipeline, Stage
from omni_actors.errors import NoPlace
from omni_actors.protocol.messages import Address

HERE = Node(name="here", labels=(PARENT,))
G1, G2 = (Node(name=name, labels=("gpu",), gpus=1) for name in ("g1", "g2"))
A0, A1, B0, B1 = Address("a", 0), Address("a", 1), Address("b", 0), Address("b", 1)


def placements(*nodes: Node, cluster: Mapping[str, Any] | None = None, a: Any = None, b: Any = None) -> Placements:
    stages = {
        "a": Stage(engine="echo", accepts=("script",), **(a or {})),
        "b": Stage(engine="echo", inputs=("a",), emits="text", **(b or {})),
    }
    return Placements(Pipeline(name="two", stages=stages, cluster=Cluster(**(cluster or {}))), nodes)


def node(found: Placements, address: Address) -> str:
    """Return the node of a worker that is started."""
    return found.find(address).node


def test_a_worker_keeps_its_place_over_its_restarts() -> None:
    found = placements(G1, G2, a={"device": "cuda", "replicas": 2})
    places = [found.find(A0), found.find(A1)]
    assert [at.node for at in places] == ["g1", "g2"]
    assert [found.find(A1), found.find(A0)] == places[::-1]


async def test_more_devices_of_a_node_help_only_a_worker_that_waits_and_gets_its_place_by_them() -> None:
    none = structs.replace(G2, gpus=0)
    found = placements(HERE, G1, none, cluster={"nodes": {"a": "gpu"}}, a={"device": "cuda"})
    assert (node(found, A0), node(found, B0)) == ("g1", "here")
    assert not found.would_help(G2), "no worker waits"
    found.lose("g1")
    assert not found.would_help(G2), "no worker waits yet"
    async with trio.open_nursery() as nursery:
        nursery.start_soon(found.wait_place, A0, lambda reason: None)
        await trio.testing.wait_all_tasks_blocked()
        assert found.would_help(G2)
        assert not found.would_help(none)
        assert not found.would_help(structs.replace(HERE, gpus=1)), "it has a worker, and not the label"
        found.join(G2)
    assert node(found, A0) == "g2"
    assert not found.would_help(structs.replace(G2, gpus=2)), "it has a worker"


def test_the_workers_of_a_lost_node_move() -> None:
    found = placements(HERE, G1, G2, cluster={"nodes": {"a": "gpu"}})
    assert (node(found, A0), node(found, B0)) == ("g1", "here")
    found.lose("g1")
    assert found.of(A0) is None
    assert [each.alive for each in found.nodes] == [True, False, True]
    assert (node(found, A0), node(found, B0)) == ("g2", "here")


def test_a_worker_of_a_lost_node_counts_once() -> None:
    nodes = [Node(name=name, labels=("big",), cpus=6) for name in ("x", "y")]
    found = placements(
        HERE,
        *nodes,
        Node(name="gpu", labels=("big",), cpus=64, gpus=8),
        cluster={"nodes": {"b": "big"}},
        b={"threads": 4},
    )
    found.plan()
    assert node(found, B0) == "x"
    found.lose("x")
    assert node(found, B0) == "y"


async def test_a_worker_waits_for_a_node_and_says_why(autojump_clock: trio.testing.MockClock) -> None:
    found, reasons, at = placements(HERE, G1, cluster={"nodes": {"a": "gpu"}}), list[str](), list[str]()

    async def wait() -> None:
        at.append((await found.wait_place(A0, reasons.append)).node)

    found.lose("g1")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait)
        await trio.testing.wait_all_tasks_blocked()
        assert reasons == [
            "no node can run a.0: here: it does not have the label 'gpu'; g1: it is lost",
        ]
        found.join(Node(name="g3"))
        await trio.testing.wait_all_tasks_blocked()
        assert len(reasons) == 2
        found.join(G1)
    assert at == ["g1"]


async def test_a_worker_that_waits_says_why_after_the_loss_of_another_node(
    autojump_clock: trio.testing.MockClock,
) -> None:
    found, reasons = placements(G1, G2, a={"device": "cuda", "replicas": 3}), list[str]()
    assert (node(found, A0), node(found, A1)) == ("g1", "g2")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(found.wait_place, Address("a", 2), reasons.append)
        await trio.testing.wait_all_tasks_blocked()
        found.lose("g1")
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    assert reasons == [
        "no node can run a.2: g1, g2: it has no devices for another worker of 'a'",
        "no node can run a.2: g1: it is lost; g2: it has no devices for another worker of 'a'",
    ]


async def test_a_worker_that_waits_for_its_colocated_one_moves_with_it(autojump_clock: trio.testing.MockClock) -> None:
    """The place of both is found when the other one is started."""
    found, at = placements(HERE, G1, cluster={"colocate": (("a", "b"),)}, b={"device": "cuda"}), list[str]()
    found.release(B0)
    found.lose("g1")
    assert node(found, A0) == "here"

    async def wait() -> None:
        at.append((await found.wait_place(B0, lambda reason: None)).node)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait)
        await trio.testing.wait_all_tasks_blocked()
        found.join(G1)
        await trio.testing.wait_all_tasks_blocked()
        assert not at
        found.lose("here")
        assert node(found, A0) == "g1"
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    assert at == ["g1"]


async def test_a_worker_waits_until_a_place_is_released(autojump_clock: trio.testing.MockClock) -> None:
    found, at = placements(G1, a={"device": "cuda", "replicas": 2}), list[str]()
    node(found, A0)

    async def wait() -> None:
        at.append((await found.wait_place(A1, lambda reason: None)).node)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait)
        await trio.testing.wait_all_tasks_blocked()
        assert not at
        found.release(A0)
    assert at == ["g1"]
    with pytest.raises(NoPlace):
        found.find(A0)


def test_colocated_workers_get_a_node_that_takes_both_whichever_comes_first() -> None:
    roomy = Node(name="roomy", labels=("red", "blue"), gpus=2)
    nodes = [Node(name="red", labels=("red",), gpus=2), Node(name="one", labels=("red", "blue")), roomy]
    for first, second in ((A0, B0), (B0, A0)):
        cluster = {"colocate": (("a", "b"),), "nodes": {"a": "red", "b": "blue"}}
        found = placements(*nodes, cluster=cluster, b={"device": "cuda"})
        assert (node(found, first), node(found, second)) == ("roomy", "roomy")


def test_colocated_workers_move_together() -> None:
    found = placements(G1, G2, cluster={"colocate": (("a", "b"),)}, b={"device": "cuda"})
    assert (node(found, A0), node(found, B0)) == ("g1", "g1")
    found.lose("g1")
    assert (node(found, B0), node(found, A0)) == ("g2", "g2")


def test_a_later_worker_leaves_room_for_those_that_are_to_join_it() -> None:
    nodes = [Node(name="small", gpus=0), Node(name="large", gpus=2)]
    found = placements(*nodes, cluster={"colocate": (("a", "b"),)}, b={"device": "cuda"})
    assert (node(found, A1), node(found, B1)) == ("large", "large")


def test_a_plan_of_all_workers_at_first() -> None:
    found = placements(HERE, G1, a={"device": "cuda"})
    found.plan()
    assert [found.find(each).node for each in (A0, B0)] == ["g1", "here"]
    with pytest.raises(NoPlace, match=r"a\.1: here, g1: it has no devices"):
        placements(HERE, G1, a={"device": "cuda", "replicas": 2}).plan()


def test_a_replica_that_was_removed_needs_no_room_beside_its_colocated_one() -> None:
    cluster = {"colocate": (("a", "b"),), "spread": ("a",)}
    found = placements(G1, G2, cluster=cluster, a={"replicas": 2}, b={"device": "cuda"})
    found.plan()
    assert [node(found, each) for each in (A0, B0, A1, B1)] == ["g1", "g1", "g2", "g2"]
    found.release(B1)
    found.lose("g2")
    found.join(HERE)
    assert node(found, A1) == "here"


def test_after_the_loss_of_several_nodes_the_larger_units_come_first() -> None:
    """Whichever worker is started first, and although a node is back later than the other one."""
    a2 = Address("a", 2)
    small, large = Node(name="small", gpus=1), Node(name="large", gpus=2)
    found = placements(
        *(small, large),
        cluster={"colocate": (("a", "b"),)},
        a={"device": "cuda", "replicas": 3},
        b={"device": "cuda", "devices_per_replica": 2},
    )
    found.plan()
    assert {each: node(found, each) for each in (A0, B0)} == {A0: "large", B0: "large"}
    for each in (small, large):
        found.lose(each.name)
    found.join(large)
    assert node(found, A1) == "large"
    with pytest.raises(NoPlace):
        found.find(a2)
    found.join(small)
    assert {each: node(found, each) for each in (A0, B0, a2)} == {A0: "large", B0: "large", a2: "small"}
