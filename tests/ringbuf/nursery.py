"""Children that are cheap to have, and may die at any time.

Rule 1: they are forked by a small process of one thread, so that hundreds of them cost little, and nothing of the
test's own process is in them.
Rule 2: what a child has got done it tells through a pipe, which outlives it.
Rule 3: a dead child stays a zombie until ``wait``, so that its number is nobody else's.
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

Tell: TypeAlias = Callable[[str], None]


class Child:
    """A process with one end of a ring. ``told``: lines."""

    def __init__(self, pid: int, report: int, server: socket.socket) -> None:
        self.pid, self._report, self._server = pid, report, server
        self._open = True
        self._rest = b""
        self.told: list[str] = []
        self.status: int | None = None
        """As waitpid has it, after ``wait``."""

    def fileno(self) -> int:
        """Readable when it told something, or died."""
        return self._report

    def is_dead(self) -> bool:
        return not self._open or bool(select.select([self._server], [], [], 0)[0])

    def hear(self) -> bool:
        """Wait for news. False: it is dead, and has told all."""
        news = os.read(self._report, 1 << 16)
        *lines, self._rest = (self._rest + news).split(b"\n")
        self.told += [line.decode() for line in lines]
        return bool(news)

    def wait(self) -> None:
        """Until it is dead. Idempotent."""
        if self._open:
            while self.hear():
                pass
            os.close(self._report)
            self._open = False
            self._server.recv(64)
            self._server.send(b"collect")
            self.status = int(self._server.recv(64))

    def kill(self) -> None:
        if self._open:
            os.kill(self.pid, signal.SIGKILL)
            self.wait()


class Nursery:
    """Has one child at a time, which runs ``live(ring, tell, *arguments)`` of a module."""

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

    def bear(self, ring: Ring, *arguments: Any) -> Child:
        """The arguments travel as JSON."""
        read, write = os.pipe()
        request = json.dumps([ring.generation, *arguments]).encode()
        socket.send_fds(self._socket, [request], [*ring.fds, write])
        os.close(write)
        self.child = Child(int(self._socket.recv(64)), read, self._socket)
        return self.child

    def __enter__(self) -> Nursery:
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
            be_born(live, json.loads(request), fds[:3], fds[3])
        for fd in fds:
            os.close(fd)
        server.send(str(pid).encode())
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        server.send(b"dead")
        if server.recv(64):
            server.send(str(os.waitpid(pid, 0)[1]).encode())


def be_born(live: Callable[..., None], request: list[Any], fds: list[int], report: int) -> None:
    """Does not return. Exit code 1: it failed, and told its traceback."""
    generation, *arguments = request

    def tell(line: str) -> None:
        os.write(report, f"{line}\n".encode())

    exit_code = 1
    try:
        with Ring.attach(fds, generation=generation) as ring:
            live(ring, tell, *arguments)
        exit_code = 0
    except BaseException:
        tell(traceback.format_exc())
        raise
    finally:
        os._exit(exit_code)


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[2])) as server:
        serve(sys.argv[1], server)
