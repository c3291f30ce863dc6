"""Child processes that are cheap to start, and that a test may kill at any time.

Rule 1: a small process with one thread forks them, so that hundreds of them cost little and inherit nothing of the
test's own process.
Rule 2: a child reports what it has done through a pipe, which outlives it.
Rule 3: a dead child stays a zombie until ``wait``, so that no other process gets its pid.
"""

from __future__ import annotations

import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, TypeAlias

import ringbuf
from ringbuf import Ring

WATCHDOG_S = 30.0

Report: TypeAlias = Callable[[str], None]


class Child:
    """A process with one end of a ring. ``reports`` holds the lines that it has written."""

    def __init__(self, pid: int, pipe: int, server: socket.socket) -> None:
        self.pid, self._pipe, self._server = pid, pipe, server
        self._open = True
        self._rest = b""
        self.reports: list[str] = []
        self.status: int | None = None
        """As waitpid has it, after ``wait``."""

    def fileno(self) -> int:
        """Readable when the child has written a report, or has exited."""
        return self._pipe

    def is_dead(self) -> bool:
        return not self._open or bool(select.select([self._server], [], [], 0)[0])

    def has_reported(self, line: str) -> bool:
        """Read what the child has written until now, without waiting."""
        while self._open and select.select([self._pipe], [], [], 0)[0] and self.read():
            pass
        return line in self.reports

    def read(self) -> bool:
        """Wait for reports. Return False when the child has exited and all reports have been read."""
        data = os.read(self._pipe, 1 << 16)
        *lines, self._rest = (self._rest + data).split(b"\n")
        self.reports += [line.decode() for line in lines]
        return bool(data)

    def wait(self) -> None:
        """Wait until the child has exited, and reap it. Idempotent."""
        if self._open:
            while self.read():
                pass
            os.close(self._pipe)
            self._open = False
            self._server.recv(64)
            self._server.send(b"collect")
            self.status = int(self._server.recv(64))

    def kill(self) -> None:
        if self._open:
            os.kill(self.pid, signal.SIGKILL)
            self.wait()


class ChildHost:
    """A process that has one child at a time, which runs ``live(ring, report, *arguments)`` of a module."""

    def __init__(self, module: str) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.settimeout(WATCHDOG_S)
        self.child: Child | None = None
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __spec__.name, module, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                cwd=Path(ringbuf.__file__).parent.parent,
                env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
            )

    def start(self, ring: Ring, *arguments: Any) -> Child:
        """Start a child; its arguments are sent as JSON."""
        read, write = os.pipe()
        request = json.dumps([ring.generation, *arguments]).encode()
        socket.send_fds(self._socket, [request], [*ring.fds, write])
        os.close(write)
        self.child = Child(int(self._socket.recv(64)), read, self._socket)
        return self.child

    def __enter__(self) -> ChildHost:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.child is not None:
            self.child.kill()
        self._socket.close()
        self._process.wait(WATCHDOG_S)


def serve(module: str, server: socket.socket) -> None:
    live = importlib.import_module(module).live
    while True:
        request, fds, _, _ = socket.recv_fds(server, 4096, 4)
        if not request:
            return
        pid = os.fork()
        if not pid:
            server.close()
            run_child(live, json.loads(request), fds[:3], fds[3])
        for fd in fds:
            os.close(fd)
        server.send(str(pid).encode())
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        server.send(b"dead")
        if server.recv(64):
            server.send(str(os.waitpid(pid, 0)[1]).encode())


def run_child(live: Callable[..., None], request: list[Any], fds: list[int], pipe: int) -> None:
    """Run a child; does not return. It exits with code 1 after it has reported a traceback."""
    generation, *arguments = request

    def report(line: str) -> None:
        os.write(pipe, f"{line}\n".encode())

    exit_code = 1
    try:
        with Ring.attach(fds, generation=generation) as ring:
            live(ring, report, *arguments)
        exit_code = 0
    except BaseException:
        report(traceback.format_exc())
        raise
    finally:
        os._exit(exit_code)


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[2])) as server:
        serve(sys.argv[1], server)
