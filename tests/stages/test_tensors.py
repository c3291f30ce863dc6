"""Tensors of torch as bytes of a ring. What concerns a device runs on one where there is one (marker gpu)."""

from __future__ import annotations

import pytest
import torch

from omni_actors.stages.tensors import DeviceBytes, to_torch, to_wire
from ringbuf import Ring, Tensor, decode_bundle, encode_bundle
from tests.support.on_gpu import on_gpu

DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool]


def passed(tensor: Tensor, capacity: int, device: torch.device | None = None) -> torch.Tensor:
    """Return the tensor after it went through a ring."""
    with Ring.create(capacity) as ring:
        producer, consumer = ring.claim_producer(), ring.claim_consumer()
        if device is not None and device.type == "cuda":
            ring.register_cuda()
        for _ in producer.sending(*encode_bundle({}, {"it": tensor})):
            assert consumer.try_recv() is None  # takes the fragments that are there
        with consumer.recv(timeout=0) as frame:
            return to_torch(decode_bundle(frame.data).tensors["it"], device)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("shape", [(), (0, 3), (7, 5)])
def test_a_tensor_on_the_host_arrives_as_it_was(dtype: torch.dtype, deferred: bool, shape: tuple[int, ...]) -> None:
    sent = torch.ones(shape).cumsum(-1).to(dtype) if shape else torch.tensor(1).to(dtype)
    received = passed(to_wire(sent.t() if len(shape) == 2 else sent, deferred=deferred), 16 << 10)
    assert torch.equal(received, sent.t() if len(shape) == 2 else sent)
    assert received.dtype == dtype


@pytest.mark.parametrize("capacity", [4096, 1 << 20])
def test_deferred_bytes_of_a_tensor_arrive_whole_and_in_fragments(capacity: int) -> None:
    """On the host: the copy of a device's tensor is the same calls."""
    sent = torch.arange(5000, dtype=torch.int32)
    wire = Tensor("int32", sent.shape, DeviceBytes(sent.view(torch.uint8)))
    assert torch.equal(passed(wire, capacity), sent)


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("capacity", [4096, 1 << 20])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_tensor_passes_from_device_to_device(capacity: int, dtype: torch.dtype) -> None:
    device = torch.device("cuda")
    sent = torch.arange(5000, device=device).to(dtype)
    wire = to_wire(sent, deferred=True)
    assert isinstance(wire.buffer, DeviceBytes)
    received = passed(wire, capacity, device)
    assert received.device.type == "cuda"
    assert torch.equal(received, sent)
