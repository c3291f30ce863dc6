"""A tensor passes from one process to another on one device: as bytes through a ring, and by handle.

``python -m bench.gpu.handover DEVICE WAY BYTES FD FD FD`` is the sending process: a message for each line on its stdin.
Without a CUDA device the handles are those of host memory, which save nothing.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable
from typing import Any

import torch

from omni_actors.protocol import chunks
from omni_actors.stages.cuda_memory import CudaMemory
from omni_actors.stages.tensors import to_torch, to_wire
from omni_actors.worker.arena import Arena
from omni_actors.worker.host_memory import HostMemory
from omni_actors.worker.incoming import Incoming
from omni_actors.worker.outgoing import Outgoing, encode
from omni_actors.worker.pinning import Pinning
from ringbuf import Ring

WAYS = "ring", "handle"
TIMES = 20
WATCHDOG_S = 120.0


def handovers(device: str, sizes: Iterable[int]) -> list[dict[str, Any]]:
    """Return a row for each size: bytes per second from the request for a tensor until a copy is on the device."""
    return [{"bytes": size} | {way: size / _median_s(device, way, size) for way in WAYS} for size in sizes]


def _median_s(device: str, way: str, size: int) -> float:
    with Ring.create(4 * size) as ring:
        command = [sys.executable, "-m", "bench.gpu.handover", device, way, str(size), *map(str, ring.fds)]
        with subprocess.Popen(command, pass_fds=ring.fds, stdin=subprocess.PIPE) as sender:
            assert sender.stdin is not None
            edge = Incoming(_own(ring.fds), _pinning(device), _arena(device))
            took_s = list[float]()
            for _ in range(TIMES):
                began = time.perf_counter()
                sender.stdin.write(b"\n")
                sender.stdin.flush()
                with edge.consumer.recv(timeout=WATCHDOG_S) as frame:
                    header, tensors = chunks.decode(frame.data)
                    assert (header.in_arena is not None) == (way == "handle"), "it went the other way"
                    complete = edge.complete(header, tensors)
                    assert complete is not None, "the sender is alive"
                    to_torch(complete["it"], torch.device(device))
                    if device.startswith("cuda"):
                        torch.cuda.synchronize()
                took_s.append(time.perf_counter() - began)
            sender.stdin.close()
            edge.close()
    return statistics.median(took_s)


def _send(device: str, way: str, size: int, fds: list[int]) -> None:
    out = Outgoing(Ring.attach(fds, generation=0), _pinning(device), by_handle=way == "handle")
    arena = _arena(device) if way == "handle" else None
    tensor = torch.ones(size, dtype=torch.uint8, device=device)
    for seq, _ in enumerate(sys.stdin):
        out.free_passed()
        header = chunks.ChunkHeader(request=1, source="sender", seq=seq, last=False, data={}, decisions=())
        out.send(1, encode(header, {"it": to_wire(tensor, deferred=True)}, arena=arena))
        assert not out.waiting_bytes, "the ring has room for four"


def _own(fds: tuple[int, int, int]) -> Ring:
    return Ring.attach([os.dup(fd) for fd in fds], generation=0)


def _pinning(device: str) -> Pinning:
    return Pinning(device, enabled=True, warn=sys.exit)


def _arena(device: str) -> Arena:
    return Arena(lambda: CudaMemory(device) if device.startswith("cuda") else HostMemory(), sys.exit)


if __name__ == "__main__":
    _send(sys.argv[1], sys.argv[2], int(sys.argv[3]), [int(fd) for fd in sys.argv[4:]])
