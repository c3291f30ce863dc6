"""A CUDA device's memory as one that two workers share (``worker.arena``), by CUDA's own handles (CUDA IPC).

Rule 1: the block is allocated by CUDA's runtime and not by torch. So its handle and its place are ours alone, whatever
torch's caching allocator does, and it starts at a multiple of what CUDA can export.
Rule 2: copies run on torch's current stream, so they are in order with the engine's kernels, and are waited for.
Rule 3: a block that was made here is never freed. The end of the process frees it, which receivers can see.
"""

from __future__ import annotations

import ctypes
from contextlib import AbstractContextManager, nullcontext

import torch

from omni_actors.stages.tensors import DeviceBytes, wait
from ringbuf import CudaFailed, CudaRuntime, SendBuffer

HANDLE_BYTES = 64  # sizeof(cudaIpcMemHandle_t)
LAZY_PEER_ACCESS, DEVICE_TO_DEVICE = 1, 3


class _Handle(ctypes.Structure):
    """cudaIpcMemHandle_t, which CUDA takes by value."""

    _fields_ = (("reserved", ctypes.c_ubyte * HANDLE_BYTES),)


class CudaBlock:
    """A block of a device's memory. address: where it begins in this process."""

    def __init__(self, runtime: CudaRuntime, device: torch.device, address: int, handle: bytes) -> None:
        self._runtime, self._device, self._address = runtime, device, address
        self.handle = handle

    def takes(self, buffer: SendBuffer) -> bool:
        return isinstance(buffer, DeviceBytes) and buffer.tensor.device == self._device

    def write(self, offset: int, buffer: SendBuffer) -> None:
        assert isinstance(buffer, DeviceBytes), "it was asked"
        self._copy(self._address + offset, buffer.tensor.data_ptr(), buffer.nbytes)

    def read(self, offset: int, nbytes: int) -> DeviceBytes:
        copy = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        self._copy(copy.data_ptr(), self._address + offset, nbytes)
        return DeviceBytes(copy)

    def close(self) -> None:
        with _current(self._device):
            self._runtime.call("cudaIpcCloseMemHandle", ctypes.c_void_p(self._address))

    def _copy(self, to: int, source: int, nbytes: int) -> None:
        """Copy within the device, and wait for it."""
        with _current(self._device):
            self._runtime.call(
                "cudaMemcpyAsync",
                ctypes.c_void_p(to),
                ctypes.c_void_p(source),
                ctypes.c_size_t(nbytes),
                ctypes.c_int(DEVICE_TO_DEVICE),
                ctypes.c_void_p(_stream(self._device)),
            )
            wait(self._device)


class CudaMemory:
    """Makes and opens blocks of a device's memory. device: a torch device: "cuda:0"."""

    block_bytes = 256 << 20  # a multiple of 2 MiB: CUDA exports no less, so nothing else is exported with it
    smallest = 16 << 10

    def __init__(self, device: str) -> None:
        """Raises CudaFailed: no CUDA runtime is loaded."""
        named = torch.device(device)
        self._device = torch.device("cuda", named.index or 0) if named.type == "cuda" else named
        self._runtime = CudaRuntime()

    def make(self) -> CudaBlock:
        address, handle = ctypes.c_void_p(), _Handle()
        with _current(self._device):
            self._runtime.call("cudaMalloc", ctypes.byref(address), ctypes.c_size_t(self.block_bytes))
            try:
                self._runtime.call("cudaIpcGetMemHandle", ctypes.byref(handle), address)
            except CudaFailed:
                self._runtime.call("cudaFree", address)
                raise
        return CudaBlock(self._runtime, self._device, address.value or 0, bytes(handle))

    def open(self, pid: int, handle: bytes, size: int) -> CudaBlock:
        address = ctypes.c_void_p()
        named = _Handle.from_buffer_copy(handle)
        with _current(self._device):
            self._runtime.call("cudaIpcOpenMemHandle", ctypes.byref(address), named, ctypes.c_uint(LAZY_PEER_ACCESS))
        return CudaBlock(self._runtime, self._device, address.value or 0, handle)


def _current(device: torch.device) -> AbstractContextManager[None]:
    """Make the device the thread's current one for a block."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _stream(device: torch.device) -> int:
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
