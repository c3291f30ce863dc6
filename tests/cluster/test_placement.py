"""Placement: a table of pipelines and nodes, a table of refusals, and properties of all placements."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_actors import config
from omni_actors.cluster.placement import PARENT, Node, Place, first_workers, place
from omni_actors.config import Cluster, Pipeline, Stage
from omni_actors.errors import ConfigError, NoPlace
from omni_actors.protocol.messages import Address

HERE = Node(name="here", labels=(PARENT,), cpus=4)
GPU = {name: Node(name=name, labels=("gpu",), cpus=4, gpus=2) for name in ("g1", "g2", "g3")}


def chain(cluster: Mapping[str, Any] | None, **stages: Mapping[str, Any]) -> Pipeline:
    """A pipeline whose stages form a chain from the client to the client."""
    made, names = {}, list(stages)
    for n, (name, fields) in enumerate(stages.items()):
        ends: dict[str, Any] = {"inputs": (names[n - 1],)} if n else {"accepts": ("script",)}
        if n == len(names) - 1:
            ends["emits"] = "text"
        made[name] = Stage(engine="echo", **ends, **fields)
    return Pipeline(name="chain", stages=made, cluster=None if cluster is None else Cluster(**cluster))


CUDA = {"device": "cuda"}
TABLE: dict[str, tuple[Pipeline, list[Node], str]] = {
    "without the section, all on the parent's node": (
        chain(None, a={"replicas": 3, "threads": 4}, b={}),
        [GPU["g1"], HERE],
        "a.0@here a.1@here a.2@here b.0@here",
    ),
    "stages that are joined by rings prefer one node, and the client is on the parent's": (
        chain({}, a={}, b={}),
        [GPU["g1"], HERE, GPU["g2"]],
        "a.0@here b.0@here",
    ),
    "a label": (chain({"nodes": {"b": "gpu"}}, a={}, b={}), [HERE, GPU["g1"]], "a.0@here b.0@g1"),
    "a node's name is a label": (
        chain({"nodes": {"a": "g2", "b": "g1"}}, a={}, b={}),
        [HERE, *GPU.values()],
        "a.0@g2 b.0@g1",
    ),
    "rings lead to the node of the neighbours": (
        chain({"nodes": {"b": "g2"}}, a={}, b={}, c={"threads": 3}, d={}),
        [HERE, *GPU.values()],
        "a.0@here b.0@g2 c.0@g2 d.0@here",
    ),
    "threads that do not fit go elsewhere": (
        chain({}, a={"threads": 3}, b={"threads": 3}),
        [HERE, Node(name="near", cpus=3), Node(name="far", cpus=9)],
        "a.0@here b.0@far",
    ),
    "threads that fit nowhere stay with their neighbours": (
        chain({}, a={"threads": 3}, b={"threads": 3}),
        [HERE, Node(name="small", cpus=1)],
        "a.0@here b.0@here",
    ),
    "devices count on each node": (
        chain({}, a={**CUDA, "replicas": 3, "standby": 1}),
        [HERE, GPU["g1"], GPU["g2"]],
        "a.0@g1:0 a.1@g2:0 a.2@g1:1 a.3@g2:1",
    ),
    "a template that begins at another device": (
        chain({}, a={"device": "cuda:1", "replicas": 2}),
        [GPU["g1"], GPU["g2"]],
        "a.0@g1:1 a.1@g2:1",
    ),
    "a pool is that of each node": (
        chain({}, a={**CUDA, "devices": (1, 0), "replicas": 3}),
        [GPU["g1"], GPU["g2"]],
        "a.0@g1:1 a.1@g2:1 a.2@g1:0",
    ),
    "workers with several devices": (
        chain({}, a={**CUDA, "devices_per_replica": 2, "replicas": 2}),
        list(GPU.values()),
        "a.0@g1:0,1 a.1@g2:0,1",
    ),
    "shared devices": (
        chain({}, a={**CUDA, "share_devices": True, "replicas": 2}),
        [Node(name="g", gpus=1)],
        "a.0@g:0 a.1@g:0",
    ),
    "stages take devices of their own while there are some": (
        chain({}, a=CUDA, b=CUDA, c=CUDA),
        [Node(name="x", gpus=1, cpus=9), Node(name="y", gpus=1, cpus=9)],
        "a.0@x:0 b.0@y:0 c.0@y:0",
    ),
    "colocated stages share a node and its device": (
        chain({"colocate": (("a", "b"),)}, a={**CUDA, "replicas": 2}, b={**CUDA, "replicas": 2}),
        [Node(name="x", gpus=1), Node(name="y", gpus=1)],
        "a.0@x:0 a.1@y:0 b.0@x:0 b.1@y:0",
    ),
    "the node of colocated stages has the labels of both": (
        chain({"colocate": (("a", "b"),), "nodes": {"a": "red", "b": "blue"}}, a={}, b={}),
        [Node(name="x", labels=("red",)), Node(name="y", labels=("blue",)), Node(name="z", labels=("blue", "red"))],
        "a.0@z b.0@z",
    ),
    "larger units come first": (
        chain({"colocate": (("b", "a"),)}, a={**CUDA, "replicas": 2}, b={**CUDA, "devices_per_replica": 2}),
        [Node(name="y", gpus=1), Node(name="z", gpus=2)],
        "a.0@z:0 a.1@y:0 b.0@z:0,1",
    ),
    "spread": (
        chain({"spread": ("a",)}, a={"replicas": 3, "standby": 1}, b={}),
        [HERE, GPU["g1"], GPU["g2"]],
        "a.0@here a.1@g1 a.2@g2 a.3@here b.0@here",
    ),
    "a lost node gets nothing": (
        chain({"nodes": {"a": "gpu"}}, a={}),
        [Node(name="g1", labels=("gpu",), alive=False), GPU["g2"]],
        "a.0@g2",
    ),
}


@pytest.mark.parametrize("case", TABLE)
def test_place(case: str) -> None:
    pipeline, nodes, expected = TABLE[case]
    places = place(pipeline, first_workers(pipeline), nodes)
    shown = [f"{who}@{at.node}{':' * bool(at.devices)}{','.join(at.devices)}" for who, at in places.items()]
    assert " ".join(shown) == expected
    assert place(pipeline, first_workers(pipeline), nodes) == places


REFUSED: dict[str, tuple[Pipeline, list[Node], dict[str, str]]] = {
    "no nodes": (chain({}, a={}), [], {}),
    "the parent's node is lost": (chain(None, a={}), [Node(name="x")], {"x": "it does not have the label 'parent'"}),
    "a label": (
        chain({"nodes": {"a": "tpu"}}, a={}),
        [HERE, GPU["g1"]],
        {"here": "it does not have the label 'tpu'", "g1": "it does not have the label 'tpu'"},
    ),
    "devices": (
        chain({}, a={**CUDA, "replicas": 3}),
        [HERE, GPU["g1"]],
        dict.fromkeys(("here", "g1"), "it has no devices for another worker of 'a'"),
    ),
    "devices by name, on a node that has none": (
        chain({}, a={**CUDA, "devices": ("GPU-1",)}),
        [HERE],
        {"here": "it has no devices for another worker of 'a'"},
    ),
    "lost": (chain({}, a={}), [Node(name="x", alive=False)], {"x": "it is lost"}),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_have_the_reason_of_each_node(case: str) -> None:
    pipeline, nodes, reasons = REFUSED[case]
    with pytest.raises(NoPlace) as refused:
        place(pipeline, first_workers(pipeline), nodes)
    assert refused.value.stage == "a"
    assert refused.value.reasons == reasons


def test_an_error_about_many_nodes_is_short() -> None:
    nodes = [Node(name=f"n{n}") for n in range(100)]
    with pytest.raises(NoPlace) as refused:
        place(chain({"nodes": {"a": "gpu"}}, a={}), [Address("a", 7)], nodes)
    assert str(refused.value) == ("no node can run a.7: n0, n1, n2 and 97 others: it does not have the label 'gpu'")


def test_a_worker_keeps_its_place_and_colocated_workers_join_it() -> None:
    pipeline = chain({"colocate": (("a", "b"),)}, a={}, b={})
    held = {Address("a", 0): Place("g2", 0, ())}
    nodes = [HERE, *GPU.values()]
    assert place(pipeline, first_workers(pipeline), nodes, held) == held | {Address("b", 0): Place("g2", 0, ())}


def test_a_worker_leaves_the_last_device_to_one_that_must_run_beside_a_colocated_one() -> None:
    pipeline = chain({"colocate": (("a", "b"),)}, a={}, b=CUDA)
    nodes = [Node(name="g1", cpus=4, gpus=1), Node(name="g2", cpus=1, gpus=1)]
    held = {Address("a", 0): Place("g1", 0, ())}
    assert place(pipeline, [Address("b", 1)], nodes, {}) == {Address("b", 1): Place("g1", 0, ("0",))}
    assert place(pipeline, [Address("b", 1)], nodes, held) == {Address("b", 1): Place("g2", 0, ("0",))}
    assert place(pipeline, [Address("b", 1)], nodes[:1], held) == {Address("b", 1): Place("g1", 0, ("0",))}


def test_the_workers_of_a_lost_node_move_and_the_others_stay() -> None:
    pipeline = chain({"nodes": {"a": "gpu"}, "spread": ("a",)}, a={**CUDA, "replicas": 3})
    before = place(pipeline, first_workers(pipeline), list(GPU.values()))
    assert {at.node for at in before.values()} == {"g1", "g2", "g3"}
    lost = [Node(name="g1", labels=("gpu",), gpus=2, alive=False), GPU["g2"], GPU["g3"]]
    after = place(pipeline, first_workers(pipeline), lost, before)
    assert after == before | {Address("a", 0): Place("g2", 1, ("1",))}


def test_a_slot_that_became_free_is_used_again() -> None:
    pipeline = chain({}, a={**CUDA, "replicas": 2})
    held = {Address("a", 1): Place("g1", 1, ("1",))}
    assert place(pipeline, [Address("a", 5)], [GPU["g1"]], held) == {Address("a", 5): Place("g1", 0, ("0",))}


# properties


@st.composite
def pipelines(draw: st.DrawFn) -> Pipeline:
    names = ["a", "b", "c"][: draw(st.integers(1, 3))]
    device = st.sampled_from([{}, CUDA, {"device": "cuda:1"}, {**CUDA, "devices_per_replica": 2}])
    stages = {name: {"replicas": draw(st.integers(1, 2)), **draw(device)} for name in names}
    labels = draw(st.dictionaries(st.sampled_from(names), st.sampled_from(["red", "blue"])))
    colocate = (tuple(names[:2]),) if len(names) > 1 and draw(st.booleans()) else ()
    spread = tuple(draw(st.lists(st.sampled_from(names), unique=True)))
    return chain({"nodes": labels, "colocate": colocate, "spread": spread}, **stages)


NODES = st.lists(
    st.tuples(st.sampled_from([(), ("red",), ("blue",), ("blue", "red", PARENT)]), st.integers(0, 2), st.booleans()),
    max_size=3,
).map(
    lambda drawn: [
        Node(name=f"n{n}", labels=labels, gpus=gpus, alive=alive or gpus == 2)
        for n, (labels, gpus, alive) in enumerate(drawn)
    ]
)


def allowed(pipeline: Pipeline, nodes: Mapping[str, Node], at: Mapping[Address, str]) -> bool:
    """Whether workers may be on these nodes: the rules again, for a whole placement, without its order."""
    cluster = pipeline.cluster
    assert cluster is not None
    for address, node in at.items():
        group = next((each for each in cluster.colocate if address.stage in each), (address.stage,))
        labels = [cluster.nodes[stage] for stage in group if stage in cluster.nodes]
        if not nodes[node].alive or not all(map(nodes[node].has, labels)):
            return False
        for group in cluster.colocate:
            mates = {at[each] for each in at if each.stage in group and each.replica == address.replica}
            if address.stage in group and len(mates) > 1:
                return False
    for (name, stage), node in itertools.product(pipeline.stages.items(), nodes.values()):
        workers = sum(address.stage == name and on == node.name for address, on in at.items())
        first = 1 if stage.device == "cuda:1" else 0
        needed = first + workers * stage.devices_per_replica
        if stage.device != "cpu" and workers and needed > node.gpus:
            return False
    return True


@given(pipelines(), NODES)
def test_a_placement_is_found_where_there_is_one(pipeline: Pipeline, nodes: list[Node]) -> None:
    wanted, by_name = first_workers(pipeline), {node.name: node for node in nodes}
    try:
        places = place(pipeline, wanted, nodes)
    except NoPlace:
        every = itertools.product(by_name, repeat=len(wanted))
        assert not any(allowed(pipeline, by_name, dict(zip(wanted, each, strict=True))) for each in every)
    else:
        assert allowed(pipeline, by_name, {address: at.node for address, at in places.items()})
        slots = [(address.stage, at.node, at.slot) for address, at in places.items()]
        assert len({*slots}) == len(slots)


@given(pipelines(), NODES, st.integers(0, 2))
def test_only_workers_of_a_lost_node_move(pipeline: Pipeline, nodes: list[Node], lost: int) -> None:
    wanted = first_workers(pipeline)
    try:
        before = place(pipeline, wanted, nodes)
        left = [node for n, node in enumerate(nodes) if n != lost]
        after = place(pipeline, wanted, left, before)
    except NoPlace:
        return
    alive = {node.name for node in left}
    assert {who: at for who, at in after.items() if before[who].node in alive} == {
        who: at for who, at in before.items() if at.node in alive
    }


# the section of a pipeline's file


@pytest.mark.parametrize(
    ("section", "path", "accepted"),
    [
        ({"nodes": {"frist": "gpu"}}, "cluster.nodes.frist", "did you mean 'first'?"),
        ({"nodes": {"first": "a b"}}, "cluster.nodes[...]", "matching regex"),
        ({"spread": ["third"]}, "cluster.spread.0", "one of first, second"),
        ({"colocate": [["first", "third"]]}, "cluster.colocate.0.1", "one of first, second"),
        ({"colocate": [["first", "first"]]}, "cluster.colocate.0.1", "each stage in one group, and once"),
        ({"colocate": [["first"], ["second", "first"]]}, "cluster.colocate.1.1", "each stage in one group, and once"),
        ({"node": {}}, "cluster.node", "did you mean 'nodes'?"),
    ],
)
def test_a_mistake_in_the_section_is_found_at_its_place(section: dict[str, Any], path: str, accepted: str) -> None:
    with pytest.raises(ConfigError) as refused:
        config.load("echo", {"cluster": section})
    assert refused.value.path == path
    assert accepted in refused.value.accepted


def test_with_a_cluster_the_devices_of_a_stage_are_those_of_each_node() -> None:
    pool = {"stages.first.device": "cuda", "stages.first.devices": [0, 1], "stages.first.replicas": 3}
    with pytest.raises(ConfigError, match="neither a template nor a pool"):
        config.load("echo", pool)
    assert config.load("echo", {**pool, "cluster": {"spread": ["first"]}}).stages["first"].replicas == 3
