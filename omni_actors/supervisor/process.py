"""Worker processes: how one is spawned, identified, killed, and how its death is noticed.

Rules
1. A worker is a fresh interpreter (``spawned_process``).
2. Death is an event, never polled for: first the death mutex shows that it begins, then a pidfd that it is complete.
   A thread reaps the process, because the kernel may hold that up.
3. No orphans: a worker asks the kernel to kill it with the thread that spawned it (PDEATHSIG), checks that its parent
   is still there, and ends when its control socket closes. So workers are spawned on trio's own thread.
4. Leaving ``LocalSpawner.spawn`` has reaped the process and closed every descriptor, whatever happened inside.
"""

from __future__ import annotations

import os
import signal
import socket
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager, suppress
from typing import Any, NamedTuple, Protocol

import trio
from multiprocess import context

from omni_actors.errors import OmniError, WorkerExit
from omni_actors.platform.death_mutex import DeathMutex, exit_of_dying
from omni_actors.protocol.mailbox import Mailbox, open_mailbox
from omni_actors.protocol.messages import Address, ControlMessage
from omni_actors.protocol.packets import Envelope
from omni_actors.supervisor.spawned_process import SpawnedProcess, stop_signals_blocked
from omni_actors.supervisor.stderr_tail import StderrTail
from omni_actors.worker.main import worker_main
from ringbuf import Consumer, EndName, Producer, Ring, RingStatistics
from ringbuf.syscalls import pidfd_open, pidfd_send_signal

NO_VARIABLES: Mapping[str, str] = {}


class SpawnFailed(OmniError):
    """No process could be started, or it lacks descriptors or locks; ``__cause__`` is the system's error."""


class PlaceLost(SpawnFailed):
    """The node on which the worker was to start was lost. The text begins with ``errors.NODE_LOST``."""


class WorkerMailbox(Protocol):
    """The supervisor's end of a worker's control connection: ``protocol.mailbox.Mailbox``, or one like it."""

    fault: str | None
    """Why reading has ended although the worker may be alive. The supervisor kills it for this reason."""

    @property
    def incoming(self) -> trio.MemoryReceiveChannel[Envelope]: ...
    @property
    def congested(self) -> bool: ...
    def post(self, message: ControlMessage, fds: Sequence[int] = (), *, wakes: bool = True) -> None: ...
    def unread(self) -> Iterator[Envelope]: ...


class EdgeRing(Protocol):
    """The memory of an edge between two replicas as the supervisor uses it: ``ringbuf.Ring``, or one like it.

    The supervisor claims the client's end only. ``close_end`` closes that of a dead worker; an end on another node is
    closed with ``close``.
    """

    @property
    def fds(self) -> Sequence[int]: ...
    def claim_producer(self) -> Producer: ...
    def claim_consumer(self) -> Consumer: ...
    def statistics(self) -> RingStatistics: ...
    def close_end(self, end: EndName) -> None: ...
    def close(self) -> None: ...


class Worker(ABC):
    """A running worker, wherever it runs."""

    node: str | None = None
    """The name of its node; None without a cluster."""
    devices: tuple[str, ...] | None = None
    """The devices that it has there; None: those of its ``WorkerSpec``."""

    def __init__(self, pid: int, mailbox: WorkerMailbox) -> None:
        self.pid, self.mailbox = pid, mailbox
        self._exit: WorkerExit | None = None
        self._ending, self._dead = trio.Event(), trio.Event()

    @abstractmethod
    def kill(self) -> None:
        """Send SIGKILL. Harmless if the worker is dead already."""

    async def wait_ending(self) -> WorkerExit:
        """Wait until the worker sends no more and its exit is known. Any number of tasks may wait."""
        await self._ending.wait()
        assert self._exit is not None
        return self._exit

    @trio.lowlevel.enable_ki_protection
    async def cancel_at_end(self, scope: trio.CancelScope) -> None:
        """Cancel a scope when the worker sends no more. This is a task of its own, beside the one in the scope."""
        await self.wait_ending()
        scope.cancel()

    async def wait_dead(self) -> WorkerExit:
        """Wait until nothing of the worker is left. Any number of tasks may wait."""
        await self._dead.wait()
        return await self.wait_ending()


class Spawner(Protocol):
    """Creates workers and the rings between them: on this machine (``LocalSpawner``), elsewhere, or in a simulation."""

    async def wait_place(self, address: Address, on_waiting: Callable[[str], None]) -> tuple[str, ...] | None:
        """Wait until a worker can be started somewhere. It is no checkpoint if one can be.

        The place may be gone when ``spawn`` is called later, which then raises PlaceLost.

        on_waiting: called with the reason, in words, each time that it waits. Returns which devices of this machine the
        worker gets, as in CUDA_VISIBLE_DEVICES; None: those of its ``WorkerSpec``.
        """
        ...

    def spawn(
        self,
        address: Address,
        mailbox_capacity: int,
        *,
        environment: Mapping[str, str] = NO_VARIABLES,
        lock_fds: Sequence[int] = (),
    ) -> AbstractAsyncContextManager[Worker]:
        """Start a worker; leaving the block kills it if it is still alive, and reaps it.

        Args:
            mailbox_capacity: How many control messages may be queued in each direction.
            environment: The worker's environment variables that differ from this process's.
            lock_fds: The locks of its devices, which it has until it is loaded.

        Entering raises SpawnFailed if no process can be started; PlaceLost, if another place may be found for it.
        """
        ...

    def release(self, address: Address) -> None:
        """Let other workers have the place of one that has ended, and is not started again for now."""
        ...

    def create_ring(self, producer: Address, consumer: Address, capacity: int, generation: int) -> EdgeRing:
        """Return a ring of ``capacity`` bytes between two workers, or a worker and the client. Raises OSError."""
        ...


class LocalWorker(Worker):
    """A worker process on this machine."""

    def __init__(
        self, process: SpawnedProcess, mailbox: Mailbox, *, pidfd: int, death_mutex: DeathMutex, stderr_fd: int
    ) -> None:
        super().__init__(process.pid, mailbox)
        self._process, self._pidfd, self._death_mutex = process, pidfd, death_mutex
        self._stderr = StderrTail(stderr_fd, f"omni_actors.worker.{process.name.split()[-1]}")

    def kill(self) -> None:
        if not self._dead.is_set():
            with suppress(ProcessLookupError):  # reaped already: multiprocess does so whenever it starts a process
                pidfd_send_signal(self._pidfd, signal.SIGKILL)

    @trio.lowlevel.enable_ki_protection
    async def _watch(self) -> None:
        """Watch the process until nothing of it is left. Shielded: ``spawn`` kills the process before it leaves.

        ``spawn`` waits for that as long as it takes, so an exception here ends the process.
        """
        code: int | None = None
        with trio.CancelScope(shield=True):
            try:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._stderr.follow)
                    async with trio.open_nursery() as watching:
                        watching.start_soon(self._wait_death_mutex)
                        await trio.lowlevel.wait_readable(self._pidfd)
                        code = await self._reap()
                        watching.cancel_scope.cancel()
                    nursery.cancel_scope.cancel()
            except BaseException:
                self.kill()
                self._process.join()
                code = self._process.final_code()
                raise
            finally:
                self._dead.set()
                self._set_exit(code)

    async def _reap(self) -> int | None:
        """Reap the process, in a thread: the kernel may first have to schedule its last thread, which may take long.

        It took 39 ms at the median with a nice value of 19, beside programs that kept all cores busy. Returns what
        ``SpawnedProcess.final_code`` returns.
        """
        try:
            await trio.to_thread.run_sync(self._process.join, limiter=trio.CapacityLimiter(1))
        except RuntimeError:  # can't start new thread
            self._process.join()
        return self._process.final_code()

    @trio.lowlevel.enable_ki_protection
    async def _wait_death_mutex(self) -> None:
        self._death_mutex.watch()
        await trio.lowlevel.wait_readable(self._death_mutex.released_fd)
        if (code := exit_of_dying(self.pid)) is not None:
            self._set_exit(code)

    def _set_exit(self, code: int | None) -> None:
        """Set how the worker ended, unless that is known. code: as of ``SpawnedProcess.final_code``."""
        if self._exit is not None:
            return
        try:
            self._stderr.drain()
        finally:
            signal_name, exit_code = (None, code) if code is None or code >= 0 else (_signal_name(-code), None)
            self._exit = WorkerExit(self.pid, signal_name, exit_code, tuple(self._stderr.lines))
            self._ending.set()


class _Channels(NamedTuple):
    """What the parent and a worker share. ``theirs`` and ``stderr_write`` are the worker's ends."""

    ours: socket.socket
    theirs: socket.socket
    stderr_read: int
    stderr_write: int
    death_mutex: DeathMutex
    bell: int


def _open_channels(undo: ExitStack, child_ends: ExitStack) -> _Channels:
    """Open the channels of one worker; the stacks close them. Raises OSError."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    undo.callback(ours.close)
    child_ends.callback(theirs.close)
    ours.setblocking(False)
    stderr_read, stderr_write = os.pipe()
    undo.callback(os.close, stderr_read)
    child_ends.callback(os.close, stderr_write)
    death_mutex = DeathMutex()
    undo.callback(death_mutex.close)
    bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
    undo.callback(os.close, bell)
    return _Channels(
        ours=ours,
        theirs=theirs,
        stderr_read=stderr_read,
        stderr_write=stderr_write,
        death_mutex=death_mutex,
        bell=bell,
    )


def _start_process(
    address: Address, arguments: dict[str, Any], environment: Mapping[str, str], undo: ExitStack
) -> tuple[SpawnedProcess, int]:
    """Start a worker, and return its process and a pidfd, which ``undo`` closes. Raises SpawnFailed."""
    process = SpawnedProcess(target=worker_main, kwargs=arguments, name=f"omni-actors {address}", daemon=True)
    process.environment = environment
    try:
        with stop_signals_blocked():
            process.start()
        pidfd = pidfd_open(process.pid)
        undo.callback(os.close, pidfd)
    except BaseException as error:
        if process.pid is not None:
            process.kill()
            process.join()
        if isinstance(error, OSError):
            raise SpawnFailed(f"the process of worker {address} could not be created: {error}") from error
        raise
    return process, pidfd


class LocalSpawner:
    """Spawns workers as child processes."""

    async def wait_place(self, address: Address, on_waiting: Callable[[str], None]) -> None:
        """Return at once: all workers run on this machine."""

    @asynccontextmanager
    async def spawn(
        self,
        address: Address,
        mailbox_capacity: int,
        *,
        environment: Mapping[str, str] = NO_VARIABLES,
        lock_fds: Sequence[int] = (),
    ) -> AsyncIterator[Worker]:
        """Start a worker process (see ``Spawner.spawn``). Called on trio's own thread (rule 3)."""
        with ExitStack() as undo, ExitStack() as child_ends:
            try:
                channels = _open_channels(undo, child_ends)
            except OSError as error:
                raise SpawnFailed(f"the channels to worker {address} could not be opened: {error}") from error
            arguments = {
                "control_fd": _InheritedFd(channels.theirs.fileno()),
                "bell_fd": _InheritedFd(channels.bell),
                "stderr_fd": _InheritedFd(channels.stderr_write),
                "death_mutex_fd": _InheritedFd(channels.death_mutex.fd),
                "parent_pid": os.getpid(),
                "lock_fds": [_InheritedFd(fd) for fd in lock_fds],
            }
            process, pidfd = _start_process(address, arguments, environment, undo)
            child_ends.close()
            opened = open_mailbox(channels.ours, mailbox_capacity, channels.bell)
            async with opened as mailbox, trio.open_nursery() as nursery:
                worker = LocalWorker(
                    process,
                    mailbox,
                    pidfd=pidfd,
                    death_mutex=channels.death_mutex,
                    stderr_fd=channels.stderr_read,
                )
                nursery.start_soon(worker._watch)
                try:
                    yield worker
                finally:
                    worker.kill()
                    with trio.CancelScope(shield=True):
                        await worker.wait_dead()
                    process.close()

    def release(self, address: Address) -> None:
        """Do nothing: this machine is the only place."""

    def create_ring(self, producer: Address, consumer: Address, capacity: int, generation: int) -> Ring:
        return Ring.create(capacity, generation=generation)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # most real-time signals have no name
        return f"signal {number}"


class _InheritedFd:
    """A descriptor that the child inherits under the same number."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __reduce__(self) -> tuple[type[int], tuple[int]]:
        context.get_spawning_popen().duplicate_for_child(self.fd)
        return int, (self.fd,)
