"""The host's memory as one that two workers share (``worker.arena``): a memory file, opened through /proc.

A worker on the CPU gains nothing by it: a tensor is copied as often as through a ring. It is the second implementation
of the protocol, with which the rules of ``worker.arena`` are tested where there is no device.
"""

from __future__ import annotations

import mmap
import os

import numpy as np

from ringbuf import SendBuffer, create_memory


class HostBlock:
    """A mapped memory file. fd: its descriptor, which the block owns if it was made here."""

    def __init__(self, fd: int, size: int) -> None:
        self.handle = str(fd).encode()
        self._map = mmap.mmap(fd, size)
        self._bytes = memoryview(self._map)

    def takes(self, buffer: SendBuffer) -> bool:
        return isinstance(buffer, memoryview)

    def write(self, offset: int, buffer: SendBuffer) -> None:
        assert isinstance(buffer, memoryview), "it was asked"
        self._bytes[offset : offset + buffer.nbytes] = buffer

    def read(self, offset: int, nbytes: int) -> memoryview:
        copy = np.empty(nbytes, np.uint8).data
        copy[:] = self._bytes[offset : offset + nbytes]
        return copy

    def close(self) -> None:
        self._bytes.release()
        self._map.close()


class HostMemory:
    """Makes and opens blocks of host memory. device: "cpu"."""

    block_bytes = 64 << 20
    smallest = 1024

    def __init__(self, device: str = "cpu") -> None:
        assert device == "cpu", device

    def make(self) -> HostBlock:
        return HostBlock(create_memory(self.block_bytes), self.block_bytes)

    def open(self, pid: int, handle: bytes, size: int) -> HostBlock:
        fd = os.open(f"/proc/{pid}/fd/{int(handle)}", os.O_RDWR | os.O_CLOEXEC)
        try:
            return HostBlock(fd, size)
        finally:
            os.close(fd)
