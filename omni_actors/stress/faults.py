"""Injects faults into workers, into the memory for rings, and into a parent.

Rules
1. A worker is hit from outside, with the kernel's means: signals and limits. It does not know about the harness.
2. Memory for rings is refused where rings are created, in the ``Spawner``. Filling the machine's memory would hit
   others.
3. A signal is sent to a pidfd, so it never reaches a later process with the same pid.
"""

from __future__ import annotations

import errno
import itertools
import os
import resource
import signal
import socket
import struct
import subprocess
import sys
import time
import uuid
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, suppress
from pathlib import Path

import msgspec
import trio

from omni_actors.protocol.messages import Address
from omni_actors.stress import kill_helper, leaks
from omni_actors.stress.workload import Workload
from omni_actors.supervisor.process import NO_VARIABLES, EdgeRing, Spawner, Worker
from ringbuf.syscalls import pidfd_open, pidfd_send_signal

ORPHANED_S = 5.0
"""Within this time, workers whose parent was killed must be gone."""


class RefusingSpawner:
    """Starts workers with another spawner, and refuses memory for the next ``refusals`` rings of a stage.

    Every worker has the run's mark (``leaks.MARKER``), on whichever node: those of Ray do not inherit it.
    """

    def __init__(self, spawner: Spawner) -> None:
        self._spawner = spawner
        self.refusals: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        """How many rings of a stage were refused, by stage."""

    async def wait_place(self, address: Address, on_waiting: Callable[[str], None]) -> tuple[str, ...] | None:
        return await self._spawner.wait_place(address, on_waiting)

    def spawn(
        self,
        address: Address,
        mailbox_capacity: int,
        *,
        environment: Mapping[str, str] = NO_VARIABLES,
        lock_fds: Sequence[int] = (),
    ) -> AbstractAsyncContextManager[Worker]:
        marked = {leaks.MARKER: os.environ[leaks.MARKER], **environment}
        return self._spawner.spawn(address, mailbox_capacity, environment=marked, lock_fds=lock_fds)

    def release(self, address: Address) -> None:
        self._spawner.release(address)

    def create_ring(self, producer: Address, consumer: Address, capacity: int, generation: int) -> EdgeRing:
        for stage in (producer.stage, consumer.stage):
            if self.refusals[stage] > 0:
                self.refusals[stage] -= 1
                self.refused.update({producer.stage, consumer.stage})
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return self._spawner.create_ring(producer, consumer, capacity, generation)


class KillHelper(AbstractContextManager["KillHelper"]):
    """Starts the process that sends signals (``kill_helper``). Leaving the block has reaped it.

    Its answers are read after a death was detected. Reading them at once would wake this process at the very moment
    whose latency is measured.
    """

    def __init__(self) -> None:
        self._orders, self._reading = itertools.count(), trio.Lock()
        self._done: list[float] = []
        """When each signal was sent, as far as the answers were read."""
        self._sock, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._sock.setblocking(False)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", kill_helper.__file__, str(theirs.fileno())], pass_fds=(theirs.fileno(),)
            )

    def send(self, number: signal.Signals, victims: Sequence[Victim]) -> int:
        """Order a signal to all victims at once. Dead victims are skipped. Returns the order's number."""
        socket.send_fds(self._sock, [bytes([number])], [victim.fileno() for victim in victims])
        return next(self._orders)

    async def done_at(self, order: int) -> float:
        """Wait for the CLOCK_MONOTONIC time at which the order was carried out, in seconds."""
        async with self._reading:
            while len(self._done) <= order:
                await trio.lowlevel.wait_readable(self._sock)
                self._done += struct.unpack("d", self._sock.recv(8))
        return self._done[order]

    def __exit__(self, *_: object) -> None:
        self._sock.close()
        self._process.wait()


class Victim(AbstractContextManager["Victim"]):
    """A worker process and its pidfd, which keeps its pid from being reused. Leaving the block closes the pidfd."""

    def __init__(self, pid: int) -> None:
        """Raises ProcessLookupError."""
        self.pid, self._pidfd = pid, pidfd_open(pid)

    def fileno(self) -> int:
        """Its pidfd."""
        return self._pidfd

    def send(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):  # it is dead already
            pidfd_send_signal(self._pidfd, number)

    def limit_memory(self) -> None:
        """Limit its address space to what it has."""
        with suppress(ProcessLookupError):
            pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[0])
            self._limit(pages * resource.getpagesize())

    def unlimit_memory(self) -> None:
        """Remove the limit."""
        with suppress(ProcessLookupError):
            self._limit(resource.RLIM_INFINITY)

    def _limit(self, size: int) -> None:
        _, hard = resource.prlimit(self.pid, resource.RLIMIT_AS)
        resource.prlimit(self.pid, resource.RLIMIT_AS, (size if hard == resource.RLIM_INFINITY else hard, hard))

    def __exit__(self, *_: object) -> None:
        os.close(self._pidfd)


async def kill_parent(workload: Workload, *, loading: bool) -> tuple[float, list[str]]:
    """SIGKILL a process that runs the pipeline. Returns how many seconds its workers outlived it, and what was left."""
    mark = uuid.uuid4().hex
    pipeline = msgspec.json.encode(workload.pipeline)
    where = [] if workload.cluster is None else [workload.cluster]
    process = subprocess.Popen(  # noqa: ASYNC220 - trio's own starts a thread, which would look like a leak
        [sys.executable, "-m", "omni_actors.stress.parent", "loading" if loading else "serving", *where],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, leaks.MARKER: mark},
    )
    with process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(pipeline)  # far below a pipe's buffer
            process.stdin.close()
            with trio.move_on_after(workload.patience_s):
                await trio.lowlevel.wait_readable(process.stdout)  # it printed its line, or ended
            workers = leaks.marked_processes(mark) - {process.pid}
            at = time.monotonic()
        finally:
            process.kill()
    remaining = [] if workers else ["a parent that had no workers"]
    with trio.move_on_after(ORPHANED_S):
        for pid in workers:
            with suppress(ProcessLookupError), Victim(pid) as worker:
                await trio.lowlevel.wait_readable(worker.fileno())
    took_s = time.monotonic() - at
    for pid in leaks.marked_processes(mark):
        remaining.append(f"process {pid}: {leaks.command_line(pid)}")
        os.kill(pid, signal.SIGKILL)
    return took_s, remaining
