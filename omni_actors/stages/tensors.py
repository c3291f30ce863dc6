"""Conversion between torch's tensors and ``ringbuf.Tensor``: bytes with a dtype and a shape, bfloat16 included."""

from __future__ import annotations

import torch

import ringbuf


def to_wire(tensor: torch.Tensor) -> ringbuf.Tensor:
    """Return the tensor's bytes, contiguous and on the host: its own memory if it is both already, else a copy."""
    plain = tensor.detach().cpu().contiguous()
    data = plain.reshape(-1).view(torch.uint8).numpy() if plain.numel() else bytearray()
    return ringbuf.Tensor(str(plain.dtype).removeprefix("torch."), tuple(plain.shape), data)


def to_torch(tensor: ringbuf.Tensor) -> torch.Tensor:
    """Return a copy on the host, which may outlive the frame that ``tensor`` views."""
    dtype = getattr(torch, tensor.dtype)
    if not tensor.nbytes:
        return torch.empty(tensor.shape, dtype=dtype)
    return torch.frombuffer(bytearray(tensor.data), dtype=dtype).reshape(tensor.shape)
