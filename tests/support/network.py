"""Networks for tests of nodes: network namespaces that are joined, and a forwarder that delays or stops bytes.

Rule 1: namespaces need root and the tools of iproute2. ``why_no_namespaces`` says what is missing; a test with
the fixture ``needs_namespaces`` is skipped with that reason, and another one with the forwarder covers the code on
every machine.
Rule 2: leaving the block removes the namespaces, and with them all that joins them.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import os
import select
import shutil
import socket
import subprocess
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from types import TracebackType

_CLONE_NEWNET = 0x40000000
_numbers = itertools.count()
_libc = ctypes.CDLL(None, use_errno=True)


@functools.cache
def why_no_namespaces() -> str | None:
    """Return why network namespaces cannot be made here; None if they can."""
    if os.geteuid():
        return "network namespaces need root"
    if shutil.which("ip") is None or shutil.which("tc") is None:
        return "network namespaces need the tools `ip` and `tc` (iproute2)"
    try:
        with two_namespaces():
            return None
    except subprocess.CalledProcessError as error:
        return f"network namespaces cannot be made here: {error.stderr.strip()}"
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"network namespaces cannot be made here: {error}"


class Namespace:
    """A network namespace, which a test uses as a node. address: its own. others: the addresses of all other nodes."""

    def __init__(self, name: str, address: str, device: str, others: Sequence[str]) -> None:
        self.name, self.address, self.device, self.others = name, address, device, others

    def command(self, *command: str) -> list[str]:
        """Return the command that runs ``command`` in the namespace."""
        return ["ip", "netns", "exec", self.name, *command]

    def run(self, *command: str) -> str:
        return _run(self.command(*command))

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Move this thread into the namespace: sockets and threads that it makes belong there, also afterwards."""
        with open("/proc/thread-self/ns/net") as before, open(f"/run/netns/{self.name}") as there:
            _set_namespace(there.fileno())
            try:
                yield
            finally:
                _set_namespace(before.fileno())

    def pids(self) -> set[int]:
        """Return the processes that run in the namespace."""
        return set(map(int, _run(["ip", "netns", "pids", self.name]).split()))

    @contextmanager
    def muted(self, *others: Namespace) -> Iterator[None]:
        """Lose every packet that this node sends to others, or to all. What the others send still arrives."""
        routes = [f"{other}/32" for other in ([each.address for each in others] or self.others)]
        for route in routes:
            self.run("ip", "route", "replace", "blackhole", route)
        try:
            yield
        finally:
            for route in routes:
                self.run("ip", "route", "del", "blackhole", route)

    def why_not_limited(self) -> str | None:
        """Return why ``limited`` does not work here; None if it does."""
        try:
            with self.limited(1_000_000):
                return None
        except subprocess.CalledProcessError as error:
            return f"bandwidth cannot be limited here: {error.stderr.strip()}"

    @contextmanager
    def limited(self, bits_per_s: int, device: str | None = None) -> Iterator[None]:
        """Send no faster. device: on which; None: that of the namespace itself."""
        root = ("dev", device or self.device, "root")
        self.run("tc", "qdisc", "add", *root, "tbf", "rate", f"{bits_per_s}bit", "burst", "32kb", "latency", "100ms")
        try:
            yield
        finally:
            self.run("tc", "qdisc", "del", *root)


@contextmanager
def two_namespaces() -> Iterator[tuple[Namespace, Namespace]]:
    """Yield two namespaces with a cable between them. Raises subprocess.CalledProcessError (not possible here)."""
    nodes = _nodes(2)
    with _made(*(node.name for node in nodes)):
        devices = [node.device for node in nodes]
        _run(["ip", "link", "add", devices[0], "type", "veth", "peer", "name", devices[1]])
        try:
            for node in nodes:
                _run(["ip", "link", "set", node.device, "netns", node.name])
                _configure(node)
            yield nodes[0], nodes[1]
        finally:
            with suppress(subprocess.CalledProcessError):  # gone with its namespace
                _run(["ip", "link", "del", devices[0]])


@contextmanager
def namespaces(count: int) -> Iterator[list[Namespace]]:
    """Yield namespaces joined by a switch, a bridge in a namespace of its own. Raises as ``two_namespaces``.

    The caller may live in one of them (``Namespace.entered``): trio's threads of before and after are others.
    """
    _wait_for_threads_of_trio()
    nodes = _nodes(count)
    switch = f"{nodes[0].name}-switch"
    with _made(switch, *(node.name for node in nodes)):
        in_switch = ("ip", "-n", switch, "link")
        _run([*in_switch, "add", "bridge", "type", "bridge"])
        _run([*in_switch, "set", "bridge", "up"])
        for n, node in enumerate(nodes):
            port = ("name", f"port{n}", "netns", switch)
            _run(["ip", "-n", node.name, "link", "add", node.device, "type", "veth", "peer", *port])
            _run([*in_switch, "set", f"port{n}", "master", "bridge", "up"])
            _configure(node)
        yield nodes
        _wait_for_threads_of_trio()


def _nodes(count: int) -> list[Namespace]:
    name, network = f"{os.getpid()}-{next(_numbers)}", f"10.231.{os.getpid() % 250 + 1}"
    addresses = [f"{network}.{n + 1}" for n in range(count)]
    return [
        Namespace(f"omni-{name}-{n}", address, f"om{name}-{n}", [each for each in addresses if each != address])
        for n, address in enumerate(addresses)
    ]


@contextmanager
def _made(*names: str) -> Iterator[None]:
    try:
        for name in names:
            _run(["ip", "netns", "add", name])
        yield
    finally:
        for name in names:
            with suppress(subprocess.CalledProcessError):  # it was not made
                _run(["ip", "netns", "del", name])


def _configure(node: Namespace) -> None:
    node.run("ip", "addr", "add", f"{node.address}/24", "dev", node.device)
    node.run("ip", "link", "set", node.device, "up")
    node.run("ip", "link", "set", "lo", "up")


class Forwarder:
    """Forwards the bytes of connections to ``target``, with a delay, until it is told to stop or to cut them.

    It needs no root. One thread; memory is bounded by ``_MOST`` bytes for each direction of a connection.
    """

    _MOST = 1 << 20

    def __init__(self, target: tuple[str, int], *, delay_s: float = 0.0, cut_after: int | None = None) -> None:
        """cut_after: bytes towards the target, over all connections, after which each connection is cut."""
        self._target, self._delay_s, self._left = target, delay_s, cut_after
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address: tuple[str, int] = self._listener.getsockname()
        self._wake, self._waker = socket.socketpair()
        self._flows: list[_Flow] = []
        self._ended = False
        self.stalled = False
        """While true, no byte is forwarded, and none is lost."""
        self._connections = 0
        self._accepted = threading.Condition()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def set_stalled(self, stalled: bool) -> None:
        self.stalled = stalled
        self._waker.send(b".")

    def cut_after(self, size: int | None) -> None:
        """Cut connections after ``size`` further bytes; None: no more."""
        self._left = size
        self._waker.send(b".")

    def wait_connections(self, count: int, timeout_s: float = 30.0) -> bool:
        """Wait until so many connections have come. Returns False after the timeout."""
        with self._accepted:
            return self._accepted.wait_for(lambda: self._connections >= count, timeout_s)

    def __enter__(self) -> Forwarder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended = True
        self._waker.send(b".")
        self._thread.join()
        for each in (self._listener, self._wake, self._waker):
            each.close()

    def _run(self) -> None:
        try:
            while not self._ended:
                self._turn()
        finally:
            for flow in self._flows:
                flow.close()

    def _turn(self) -> None:
        now = time.monotonic()
        reading: list[socket.socket] = [self._listener, self._wake]
        writing: list[socket.socket] = []
        due = None
        if not self.stalled:
            reading += [flow.source for flow in self._flows if flow.size < self._MOST and self._may_read(flow)]
            for flow in self._flows:
                if flow.parts and flow.parts[0][0] <= now:
                    writing.append(flow.sink)
                elif flow.parts:
                    due = min(due or flow.parts[0][0], flow.parts[0][0])
        timeout = None if due is None else max(0.0, due - now)
        readable, writable, _ = select.select(reading, writing, [], timeout)
        if self._wake in readable:
            self._wake.recv(64)
        if self._listener in readable:
            self._accept()
        for flow in tuple(self._flows):
            if flow in self._flows and not self._move(flow, flow.source in readable, flow.sink in writable):
                self._cut(flow)

    def _accept(self) -> None:
        near = self._listener.accept()[0]
        try:
            far = socket.create_connection(self._target)
        except OSError:
            near.close()
            return
        there, back = _Flow(near, far, is_limited=True), _Flow(far, near, is_limited=False)
        self._flows += [there, back]
        with self._accepted:
            self._connections += 1
            self._accepted.notify_all()

    def _may_read(self, flow: _Flow) -> bool:
        return not flow.source_ended and not (flow.is_limited and self._left == 0)

    def _move(self, flow: _Flow, is_readable: bool, is_writable: bool) -> bool:
        """Move bytes of a flow. Returns False if its connection is to be cut."""
        try:
            if is_readable:
                self._read(flow)
            if is_writable:
                flow.write()
        except OSError:
            return False
        return not (flow.is_limited and self._left == 0 and not flow.parts)

    def _read(self, flow: _Flow) -> None:
        data = flow.source.recv(1 << 16 if self._left is None or not flow.is_limited else min(self._left, 1 << 16))
        flow.source_ended = not data
        flow.parts.append((time.monotonic() + self._delay_s, data))
        flow.size += len(data)
        if flow.is_limited and self._left is not None:
            self._left -= len(data)

    def _cut(self, flow: _Flow) -> None:
        pair = [each for each in self._flows if {each.source, each.sink} == {flow.source, flow.sink}]
        for each in pair:
            self._flows.remove(each)
        flow.close()


class _Flow:
    """One direction of a connection. parts: when each may leave, and its bytes; none at all is the end."""

    def __init__(self, source: socket.socket, sink: socket.socket, *, is_limited: bool) -> None:
        self.source, self.sink, self.is_limited = source, sink, is_limited
        self.parts: deque[tuple[float, bytes]] = deque()
        self.size = 0
        self.source_ended = False

    def write(self) -> None:
        """Send the oldest part, or as much of it as there is room for."""
        _, data = self.parts.popleft()
        if not data:
            self.sink.shutdown(socket.SHUT_WR)
            return
        sent = self.sink.send(data)
        self.size -= sent
        if sent < len(data):
            self.parts.appendleft((0.0, data[sent:]))

    def close(self) -> None:
        self.source.close()
        self.sink.close()


def _run(command: Sequence[str]) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=30).stdout


def _wait_for_threads_of_trio() -> None:
    """Wait until the idle threads that trio keeps for 10 s have ended: each stays in the namespace where it was made.

    Raises TimeoutError: a thread is in use.
    """
    deadline = time.monotonic() + 60
    while any(each.name.startswith("Trio thread") for each in threading.enumerate()):
        if time.monotonic() > deadline:
            raise TimeoutError("a thread of trio does not end")
        time.sleep(0.1)


def _set_namespace(fd: int) -> None:
    if _libc.setns(fd, _CLONE_NEWNET):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
