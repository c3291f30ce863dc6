"""Which workers hand tensors over by handle: a table, and what they are told when they are connected."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest

from omni_actors.protocol.messages import Address, Bounds, Connect, ControlMessage, WorkerSpec
from omni_actors.supervisor.devices import same_memory
from omni_actors.supervisor.edges import Edges, EdgeSpec
from omni_actors.supervisor.process import LocalSpawner


def worker(stage: str, kind: str, *devices: str, device: str = "cpu", replica: int = 0) -> WorkerSpec:
    return WorkerSpec(
        address=Address(stage, replica),
        factory="",
        bounds=Bounds(0, 0),
        device="cuda:0" if devices else device,
        devices=devices,
        device_handles=kind,
    )


PAIRS: dict[str, tuple[WorkerSpec, WorkerSpec, bool]] = {
    "one place": (worker("a", "cuda", "3"), worker("b", "cuda", "3"), True),
    "two places": (worker("a", "cuda", "3"), worker("b", "cuda", "4"), False),
    "a place that begins another": (worker("a", "cuda", "1"), worker("b", "cuda", "11"), False),
    "one UUID": (worker("a", "cuda", "GPU-8932"), worker("b", "cuda", "GPU-8932"), True),
    "the beginning of a UUID": (worker("a", "cuda", "GPU-8932f937"), worker("b", "cuda", "GPU-89"), True),
    "two UUIDs": (worker("a", "cuda", "GPU-8932"), worker("b", "cuda", "GPU-9932"), False),
    "a place and a UUID": (worker("a", "cuda", "0"), worker("b", "cuda", "GPU-8932"), False),
    "one of two devices": (worker("a", "cuda", "0", "1"), worker("b", "cuda", "0"), False),
    "the same two devices": (worker("a", "cuda", "0", "1"), worker("b", "cuda", "0", "1"), False),
    "a device and the CPU": (worker("a", "cuda", "0"), worker("b", "cuda"), False),
    "the CPU, for devices": (worker("a", "cuda"), worker("b", "cuda"), False),
    "a device, for the CPU": (worker("a", "host", "0"), worker("b", "host", "0"), False),
    "the CPU": (worker("a", "host"), worker("b", "host"), True),
    "another kind of device": (worker("a", "host", device="mps"), worker("b", "host", device="mps"), False),
    "off": (worker("a", "none", "0"), worker("b", "none", "0"), False),
    "off, on the CPU": (worker("a", "none"), worker("b", "none"), False),
}


@pytest.mark.parametrize(("first", "second", "expected"), PAIRS.values(), ids=PAIRS)
def test_two_workers_have_one_memory(first: WorkerSpec, second: WorkerSpec, expected: bool) -> None:
    assert same_memory(first, second) is expected
    assert same_memory(second, first) is expected


def test_both_ends_of_an_edge_learn_whether_they_share_a_memory() -> None:
    """Of two consumers, one is on the producer's device; an edge to the client never takes handles."""
    told: list[tuple[str, Connect]] = []
    edges = Edges([EdgeSpec("a", "b", 4096), EdgeSpec("a", "client", 4096)], LocalSpawner())
    workers = [worker("a", "cuda", "0"), worker("b", "cuda", "0"), worker("b", "cuda", "1", replica=1)]
    for each in workers:

        def post(message: ControlMessage, fds: Sequence[int], to: str = str(each.address)) -> None:
            assert isinstance(message, Connect)
            told.append((to, message))

        edges.connect_worker(each, post, pytest.fail)
    found = {(to, str(message.consumer)): message.same_memory for to, message in told}
    assert found == {
        ("a.0", "client.0"): False,
        ("a.0", "b.0"): True,
        ("b.0", "b.0"): True,
        ("a.0", "b.1"): False,
        ("b.1", "b.1"): False,
    }
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(told[0][1]), type=Connect) == told[0][1]
    for each in workers:
        edges.disconnect_worker(each.address)
    assert not edges.statistics()
