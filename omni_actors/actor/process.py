"""Worker processes: how one is spawned, named, killed, and seen to die.

Rules
1. A worker is a fresh interpreter (`multiprocess`, spawn). It never imports the parent's main module: a user's script
   needs no ``if __name__ == "__main__"``.
2. Death is an event: a pidfd in the nursery, never a poll.
3. No orphans: a worker asks the kernel to be killed with the thread that spawned it (PDEATHSIG), checks that its parent
   is still there, and ends when its control socket closes. So workers are spawned on trio's own thread.
4. Leaving ``LocalSpawner.spawn`` has reaped the process and closed every descriptor, whatever happened inside.
"""

from __future__ import annotations

import collections
import io
import logging
import os
import signal
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, suppress
from typing import Any, Protocol

import trio
from multiprocess import context, popen_spawn_posix, reduction, spawn, util

from omni_actors.actor.mailbox import Mailbox, open_mailbox
from omni_actors.actor.worker import worker_main
from omni_actors.errors import OmniError, WorkerExit
from omni_actors.messages import Address
from ringbuf import Ring

STDERR_TAIL_LINES = 40
LONGEST_LINE = 4096
STDERR_DRAIN_S = 0.5


class SpawnFailed(OmniError):
    """The machine gives no process, or no descriptors for one; ``__cause__`` says what is short."""


class Worker(Protocol):
    """A running worker, wherever it runs."""

    @property
    def pid(self) -> int: ...
    @property
    def mailbox(self) -> Mailbox: ...
    def kill(self) -> None:
        """SIGKILL. Harmless when it is dead already."""
        ...

    async def wait_dead(self) -> WorkerExit:
        """How it ended. Any number of callers."""
        ...


class Spawner(Protocol):
    """Where workers come from: this machine (``LocalSpawner``) or, behind the same calls, others or a simulation."""

    def spawn(self, address: Address, mailbox_capacity: int) -> AbstractAsyncContextManager[Worker]:
        """Start a worker; leaving the block kills it if it still lives, and reaps it.

        Entering raises SpawnFailed where no process can be started.
        """
        ...

    def connect(self, producer: Address, consumer: Address, capacity: int, generation: int) -> Ring:
        """The memory of an edge between two workers, or one and the client. Raises OSError (no memory)."""
        ...


class _Popen(popen_spawn_posix.Popen):  # type: ignore[misc]
    """multiprocess's spawn, less two things: the parent's main module, and the resource tracker process."""

    def _launch(self, process_obj: Any) -> None:
        preparation = spawn.get_preparation_data(process_obj.name)
        preparation.pop("init_main_from_name", None)
        preparation.pop("init_main_from_path", None)
        payload = io.BytesIO()
        context.set_spawning_popen(self)
        try:
            reduction.dump(preparation, payload)
            reduction.dump(process_obj, payload)
        finally:
            context.set_spawning_popen(None)
        child_read, parent_write = os.pipe()
        try:
            self._fds.append(child_read)
            command = spawn.get_command_line(tracker_fd=None, pipe_handle=child_read)
            self.pid = util.spawnv_passfds(spawn.get_executable(), command, self._fds)
        except BaseException:
            os.close(parent_write)
            raise
        finally:
            os.close(child_read)
        self.sentinel = parent_write
        self.finalizer = util.Finalize(self, os.close, (parent_write,))
        with suppress(BrokenPipeError):  # it died already: the pidfd tells
            os.write(parent_write, payload.getbuffer())  # far below a pipe's buffer: one write, no waiting


class _Process(context.SpawnProcess):  # type: ignore[misc]
    @staticmethod
    def _Popen(process_obj: Any) -> _Popen:
        return _Popen(process_obj)


@contextmanager
def _sigint_blocked() -> Iterator[None]:
    """A Ctrl-C reaches the whole foreground group: hold it off until the child ignores it (masks are inherited)."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class LocalWorker:
    """A worker process on this machine."""

    def __init__(self, process: Any, mailbox: Mailbox, pidfd: int) -> None:
        self._process, self.mailbox, self._pidfd = process, mailbox, pidfd
        self.pid: int = process.pid
        self.stderr_tail: collections.deque[str] = collections.deque(maxlen=STDERR_TAIL_LINES)
        self._stderr_ended = trio.Event()
        self._following = trio.CancelScope(shield=True)
        self._reaping = trio.Lock()
        self._exit: WorkerExit | None = None

    def kill(self) -> None:
        if self._process.exitcode is None:
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    async def wait_dead(self) -> WorkerExit:
        async with self._reaping:  # one may wait on the descriptor, the others wait for that one
            if self._exit is None:
                await trio.lowlevel.wait_readable(self._pidfd)
                self._process.join()
                with trio.move_on_after(STDERR_DRAIN_S):  # ends at once unless a grandchild still holds the pipe
                    await self._stderr_ended.wait()
                code: int = self._process.exitcode
                name, code_or_none = (_signal_name(-code), None) if code < 0 else (None, code)
                self._exit = WorkerExit(self.pid, name, code_or_none, tuple(self.stderr_tail))
        return self._exit

    @trio.lowlevel.enable_ki_protection
    async def _follow_stderr(self, name: str, read_fd: int) -> None:
        log = logging.getLogger(f"omni_actors.worker.{name}")
        pending = b""
        with self._following:
            async with trio.lowlevel.FdStream(read_fd) as stream:
                async for data in stream:
                    *lines, pending = (pending + data).split(b"\n")
                    pending = pending[-LONGEST_LINE:]
                    for line in lines:
                        text = line[-LONGEST_LINE:].decode(errors="replace").rstrip()
                        self.stderr_tail.append(text)
                        log.info(text)
                if pending:
                    self.stderr_tail.append(pending.decode(errors="replace"))
        self._stderr_ended.set()


class LocalSpawner:
    """Workers as child processes of this one."""

    @asynccontextmanager
    async def spawn(self, address: Address, mailbox_capacity: int) -> AsyncIterator[Worker]:
        try:
            ours, theirs, stderr_read, stderr_write = _channels()
        except OSError as error:
            raise SpawnFailed(f"no channels for a worker of {address}: {error}") from error
        process = _Process(
            target=worker_main,
            args=(_InheritedFd(theirs.fileno()), _InheritedFd(stderr_write), os.getpid()),
            name=f"omni-actors {address}",
            daemon=True,
        )
        try:
            with _sigint_blocked():
                process.start()
            pidfd = os.pidfd_open(process.pid)
        except BaseException as error:
            ours.close()
            os.close(stderr_read)
            if process.pid is not None:
                process.kill()
                process.join()
            if isinstance(error, OSError):
                raise SpawnFailed(f"no process for {address}: {error}") from error
            raise
        finally:
            theirs.close()
            os.close(stderr_write)
        async with open_mailbox(ours, mailbox_capacity) as mailbox, trio.open_nursery() as nursery:
            worker = LocalWorker(process, mailbox, pidfd)
            nursery.start_soon(worker._follow_stderr, str(address), stderr_read)
            try:
                yield worker
            finally:
                with trio.CancelScope(shield=True):
                    worker.kill()
                    await worker.wait_dead()
                worker._following.cancel()
                process.close()
                os.close(pidfd)

    def connect(self, producer: Address, consumer: Address, capacity: int, generation: int) -> Ring:
        return Ring.create(capacity, generation=generation)


def _channels() -> tuple[socket.socket, socket.socket, int, int]:
    """A control connection, and a pipe for stderr. Raises OSError (no descriptors), having opened nothing."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    try:
        return ours, theirs, *os.pipe()
    except OSError:
        ours.close()
        theirs.close()
        raise


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # most real-time signals have no name
        return f"signal {number}"


class _InheritedFd:
    """A descriptor that keeps its number in the child."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __reduce__(self) -> tuple[type[int], tuple[int]]:
        context.get_spawning_popen().duplicate_for_child(self.fd)
        return int, (self.fd,)
