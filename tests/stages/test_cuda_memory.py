"""CUDA's memory behind arenas: its calls on host memory, and, where there is a device (marker gpu), two processes."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from omni_actors.protocol import chunks
from omni_actors.protocol.chunks import ChunkHeader
from omni_actors.stages.cuda_memory import CudaMemory
from omni_actors.stages.tensors import DeviceBytes, to_torch, to_wire
from omni_actors.worker.arena import Arena, SenderArena
from omni_actors.worker.incoming import Incoming
from ringbuf import CudaFailed, Ring, Tensor
from tests.support.on_gpu import on_gpu

COUNT = 1 << 16
WATCHDOG_S = 60.0


class Runtime:
    """Does with host memory what CUDA's runtime does with a device's. failing: the function that fails."""

    def __init__(self, failing: str = "") -> None:
        self._failing = failing
        self.blocks: dict[int, Any] = {}
        self.opened: list[int] = []

    def call(self, function: str, *arguments: Any) -> None:
        if function == self._failing:
            raise CudaFailed(function, 2, "out of memory")
        getattr(self, function)(*arguments)

    def cudaMalloc(self, address: Any, size: ctypes.c_size_t) -> None:
        block = ctypes.create_string_buffer(size.value)
        address._obj.value = ctypes.addressof(block)
        self.blocks[ctypes.addressof(block)] = block

    def cudaFree(self, address: ctypes.c_void_p) -> None:
        del self.blocks[address.value or 0]

    def cudaIpcGetMemHandle(self, handle: Any, address: ctypes.c_void_p) -> None:
        ctypes.memmove(handle, (address.value or 0).to_bytes(64, "little"), 64)

    def cudaIpcOpenMemHandle(self, address: Any, handle: ctypes.Structure, flags: ctypes.c_uint) -> None:
        assert flags.value == 1, "cudaIpcMemLazyEnablePeerAccess, the only flag"
        address._obj.value = int.from_bytes(bytes(handle), "little")
        self.opened.append(address._obj.value)

    def cudaIpcCloseMemHandle(self, address: ctypes.c_void_p) -> None:
        self.opened.remove(address.value or 0)

    def cudaMemcpyAsync(self, to: Any, source: Any, size: Any, kind: Any, stream: Any) -> None:
        assert (kind.value, stream.value) == (3, None)
        ctypes.memmove(to, source, size.value)


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    runtime = Runtime()
    monkeypatch.setattr("omni_actors.stages.cuda_memory.CudaRuntime", lambda: runtime)
    monkeypatch.setattr(CudaMemory, "block_bytes", 8 * COUNT)
    return runtime


def values(seed: int, device: str = "cpu") -> torch.Tensor:
    return torch.arange(COUNT, dtype=torch.int32, device=device) * 7 + seed


def header(seq: int) -> ChunkHeader:
    return ChunkHeader(request=1, source="up", seq=seq, last=False, data={}, decisions=(seq,))


def on_device(tensor: torch.Tensor) -> Tensor:
    """Return a tensor of the host as one of a device is encoded."""
    return Tensor("int32", tensor.shape, DeviceBytes(tensor.view(torch.uint8)))


def test_a_tensor_passes_through_a_block_by_the_calls_of_the_runtime(runtime: Runtime) -> None:
    arena = Arena(lambda: CudaMemory("cpu"), pytest.fail)
    placed = arena.place({"first": on_device(values(1)), "host": to_wire(values(0)), "second": on_device(values(2))})
    assert placed.keys() == {"first", "second"}, "what the host has goes through the ring"
    sender = SenderArena(arena)
    copies = sender.copies(arena.in_arena(placed))
    assert copies is not None
    assert [torch.equal(to_torch(copies[name]), values(seed)) for name, seed in (("first", 1), ("second", 2))]
    assert len(runtime.opened) == len(runtime.blocks) == 1
    sender.close()
    assert not runtime.opened


@pytest.mark.parametrize("failing", ["cudaMalloc", "cudaIpcGetMemHandle"])
def test_a_device_without_memory_or_handles_is_one_line_in_the_log(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    warnings: list[str] = []
    monkeypatch.setattr(runtime, "_failing", failing)
    arena = Arena(lambda: CudaMemory("cpu"), warnings.append)
    assert [arena.place({"first": on_device(values(1))}) for _ in range(2)] == [{}, {}]
    assert len(warnings) == 1
    assert failing in warnings[0]
    assert not runtime.blocks, "a block that cannot be exported is freed"


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch brings a CUDA runtime")
def test_without_cuda_the_error_says_so() -> None:
    with pytest.raises(CudaFailed, match="no CUDA runtime is loaded"):
        CudaMemory("cuda:0")


SENDER = """
import sys
from omni_actors.worker.outgoing import Outgoing, encode
from tests.stages.test_cuda_memory import *
ring = Ring.attach([int(each) for each in sys.argv[1:]], generation=0)
arena = Arena(lambda: CudaMemory("cuda:0"), lambda text: sys.exit(text))
out = Outgoing(ring, by_handle=True)
for seed in range(8):
    out.free_passed()
    out.send(1, encode(header(seed), {"rows": to_wire(values(seed, "cuda:0"), deferred=True)}, arena=arena))
print("sent", flush=True)
sys.stdin.read()
"""


@contextmanager
def sender(ring: Ring) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", SENDER, *map(str, ring.fds)]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, pass_fds=ring.fds, **pipes) as child:
        try:
            yield child
        finally:
            child.kill()


@pytest.mark.gpu
@on_gpu
def test_tensors_pass_from_process_to_process_on_a_device_and_end_with_the_sender() -> None:
    with Ring.create(1 << 16) as ring, sender(ring) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "sent\n"
        far = Ring.attach([os.dup(fd) for fd in ring.fds], generation=0)
        edge = Incoming(far, arena=Arena(lambda: CudaMemory("cuda:0"), pytest.fail))
        device = torch.device("cuda:0")
        for seed in range(8):
            if seed == 6:
                child.kill()
                child.wait(WATCHDOG_S)
            with edge.consumer.recv(timeout=WATCHDOG_S) as frame:
                assert frame.data.nbytes < COUNT, "a handle, and not the bytes"
                found, tensors = chunks.decode(frame.data)
                complete = edge.complete(found, tensors)
                assert (complete is None) == (seed >= 6)
                if complete is not None:
                    rows = to_torch(complete["rows"], device)
                    assert rows.device == device
                    assert torch.equal(rows, values(seed, "cuda:0"))
        edge.close()


@pytest.mark.gpu
@on_gpu
def test_a_block_takes_what_lies_on_its_device_and_copies_in_the_order_of_the_stream() -> None:
    block = CudaMemory("cuda").make()
    tensor = torch.zeros(COUNT, dtype=torch.int32, device="cuda:0")
    torch.cuda._sleep(1 << 28)  # what does not wait for the stream copies the zeros
    tensor.add_(values(3, "cuda:0"))
    wire = to_wire(tensor, deferred=True)
    assert block.takes(wire.buffer)
    assert not block.takes(to_wire(values(3)).buffer)
    block.write(256, wire.buffer)
    copied = Tensor("int32", (COUNT,), block.read(256, wire.nbytes))
    assert torch.equal(to_torch(copied, torch.device("cuda:0")), tensor)
    assert torch.equal(to_torch(copied), tensor.cpu())
