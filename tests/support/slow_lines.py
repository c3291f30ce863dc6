"""Lines that delay every packet between network namespaces, where the kernel has no `netem`.

    node ── tun device ──► forwarder: a queue for each node ──► tun device ── other node

Rules
1. Routes lead the packets of each node to a tun device, the forwarder reads them, and each arrives at the node of its
   address ``delay_s`` later. Connections that exist stay: their next packets take the other way.
2. The forwarder is a process of its own, so that it does not compete with the tests' interpreter. It ends with its
   stdin. The devices end with it, and with them the routes.
3. A node's queue has at most ``MOST_BYTES``; what exceeds them is lost, as in a router. Packets stay in order.

python -m tests.support.slow_lines DELAY_S ADDRESS=FD…    the forwarder; FD: the tun device of the node
"""

from __future__ import annotations

import fcntl
import os
import select
import socket
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress

from tests.support.network import Namespace, why_no_namespaces

MOST_BYTES = 8 << 20
END_S = 10.0
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000


def why_no_slow_lines() -> str | None:
    """Return why lines cannot be slow here; None if they can."""
    if (why := why_no_namespaces()) is not None:
        return why
    return None if os.path.exists("/dev/net/tun") else "lines that delay need /dev/net/tun"


@contextmanager
def slow_lines(nodes: Sequence[Namespace], delay_s: float, bits_per_s: int | None = None) -> Iterator[None]:
    """Delay each packet between the nodes by ``delay_s``. bits_per_s: each node sends no faster, before the delay."""
    with ExitStack() as stack:
        devices = {}
        for node in nodes:
            devices[node.address] = fd = _tun(node)
            stack.callback(os.close, fd)
            if bits_per_s is not None:
                stack.enter_context(node.limited(bits_per_s, "slow"))
        command = [sys.executable, "-m", "tests.support.slow_lines", str(delay_s)]
        command += [f"{address}={fd}" for address, fd in devices.items()]
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=list(devices.values())
        )
        stack.enter_context(process)
        stack.callback(process.kill)
        assert process.stdout is not None
        if process.stdout.readline() != b"ready\n":
            raise RuntimeError("the forwarder has not started")
        for node in nodes:
            for other in node.others:
                node.run("ip", "route", "replace", f"{other}/32", "dev", "slow", "src", node.address)
        yield


def _tun(node: Namespace) -> int:
    """Make the device "slow" in a namespace, and return its descriptor. Raises OSError (no /dev/net/tun)."""
    with node.entered():
        fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        fcntl.ioctl(fd, _TUNSETIFF, struct.pack("16sH22x", b"slow", _IFF_TUN | _IFF_NO_PI))
    node.run("ip", "link", "set", "slow", "mtu", "1500", "txqueuelen", "1000", "up")
    return fd


class Queue:
    """What a node has sent, and when each packet arrives."""

    def __init__(self) -> None:
        self._packets: deque[tuple[float, bytes]] = deque()
        self._bytes = 0

    @property
    def next_at(self) -> float | None:
        return self._packets[0][0] if self._packets else None

    def put(self, at: float, packet: bytes) -> None:
        if self._bytes + len(packet) <= MOST_BYTES:
            self._packets.append((at, packet))
            self._bytes += len(packet)

    def take(self, now: float) -> Iterator[bytes]:
        while self._packets and self._packets[0][0] <= now:
            packet = self._packets.popleft()[1]
            self._bytes -= len(packet)
            yield packet


def forward(delay_s: float, devices: dict[bytes, int], end: int) -> None:
    """Forward packets until ``end`` can be read. devices: by the node's IPv4 address, 4 bytes."""
    queues = {fd: Queue() for fd in devices.values()}
    while True:
        due = [at for queue in queues.values() if (at := queue.next_at) is not None]
        timeout = max(0.0, min(due) - time.monotonic()) if due else None
        readable = select.select([end, *queues], [], [], timeout)[0]
        if end in readable:
            return
        for fd in readable:
            at = time.monotonic() + delay_s
            with suppress(BlockingIOError):
                for _ in range(64):
                    queues[fd].put(at, os.read(fd, 1 << 16))
        now = time.monotonic()
        for queue in queues.values():
            for packet in queue.take(now):
                if packet[0] >> 4 == 4 and (there := devices.get(packet[16:20])) is not None:
                    with suppress(BlockingIOError):  # lost: the node takes no more
                        os.write(there, packet)


def main(delay_s: str, *devices: str) -> None:
    pairs = [each.split("=") for each in devices]
    print("ready", flush=True)
    forward(float(delay_s), {socket.inet_aton(address): int(fd) for address, fd in pairs}, sys.stdin.fileno())


if __name__ == "__main__":
    main(*sys.argv[1:])
