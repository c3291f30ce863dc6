"""Conversion between torch's tensors and ``ringbuf.Tensor``: bytes with a dtype and a shape, bfloat16 included.

Between a CUDA device and a ring there is no staging copy: ``to_wire(…, deferred=True)`` defers the copy until there is
room in the ring, and ``to_torch(…, device)`` copies from the frame. Both wait for their copy, which is DMA where the
ring is page-locked. What came by handle (``cuda_memory``) is on the device already, as ``DeviceBytes``.
"""

from __future__ import annotations

import torch

import ringbuf


class DeviceBytes(ringbuf.Deferred):
    """The bytes of a tensor on a device. The tensor is kept, and must not change, until they are copied."""

    def __init__(self, tensor: torch.Tensor) -> None:
        """tensor: uint8 (n,), contiguous."""
        self.tensor, self.nbytes = tensor, tensor.numel()

    def copy_into(self, view: memoryview) -> None:
        if not self.nbytes:
            return
        torch.frombuffer(view, dtype=torch.uint8).copy_(self.tensor, non_blocking=True)
        wait(self.tensor.device)

    def part(self, start: int, stop: int) -> DeviceBytes:
        return DeviceBytes(self.tensor[start:stop])


def to_wire(tensor: torch.Tensor, *, deferred: bool = False) -> ringbuf.Tensor:
    """Return the tensor's bytes, contiguous and on the host: its own memory if it is both already, else a copy.

    deferred: leave the bytes of a tensor on a device there until they are sent. It must not change before that.
    """
    plain = tensor.detach().contiguous()
    dtype, shape = str(plain.dtype).removeprefix("torch."), tuple(plain.shape)
    if not plain.numel():
        return ringbuf.Tensor(dtype, shape, bytearray())
    flat = plain.reshape(-1).view(torch.uint8)
    if deferred and flat.device.type != "cpu":
        return ringbuf.Tensor(dtype, shape, DeviceBytes(flat))
    return ringbuf.Tensor(dtype, shape, flat.cpu().numpy())


def to_torch(tensor: ringbuf.Tensor, device: torch.device | None = None) -> torch.Tensor:
    """Return a copy on the device (None: the host), which may outlive the frame that ``tensor`` views."""
    dtype = getattr(torch, tensor.dtype)
    if not tensor.nbytes:
        return torch.empty(tensor.shape, dtype=dtype, device=device)
    if device is None or device.type == "cpu":
        return torch.frombuffer(bytearray(tensor.data), dtype=dtype).reshape(tensor.shape)
    if isinstance(source := tensor.buffer, DeviceBytes):
        return source.tensor.to(device, copy=True).view(dtype).reshape(tensor.shape)
    copied = torch.empty(tensor.shape, dtype=dtype, device=device)
    copied.copy_(torch.frombuffer(tensor.data, dtype=dtype).reshape(tensor.shape), non_blocking=True)
    wait(device)
    return copied


def wait(device: torch.device) -> None:
    """Wait for the copies that this thread has begun on the device's current stream."""
    if device.type == "cuda":
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record(torch.cuda.current_stream(device))
        done.synchronize()
