"""Torch's tensors and those that travel: bytes with a dtype and a shape, bfloat16 too."""

from __future__ import annotations

import torch

import ringbuf

__all__ = ["to_torch", "to_wire"]


def to_wire(tensor: torch.Tensor) -> ringbuf.Tensor:
    """On the host, contiguous: the tensor's own memory where it is so already."""
    plain = tensor.detach().cpu().contiguous()
    data = plain.reshape(-1).view(torch.uint8).numpy() if plain.numel() else bytearray()
    return ringbuf.Tensor(str(plain.dtype).removeprefix("torch."), tuple(plain.shape), data)


def to_torch(tensor: ringbuf.Tensor) -> torch.Tensor:
    """A copy on the host, so that it may outlive the frame."""
    dtype = getattr(torch, tensor.dtype)
    if not tensor.nbytes:
        return torch.empty(tensor.shape, dtype=dtype)
    return torch.frombuffer(bytearray(tensor.data), dtype=dtype).reshape(tensor.shape)
