"""Checkpoints of workers on another node: the memory stays there, and the parent has a *proxy* for each.

Rules
1. The supervisor and the orchestrator own a descriptor of each memory and close it when they need it no more. Here that
   is a proxy: one end of a socket pair. When it is closed, the agent is told to free the memory.
2. A proxy that is posted to a worker of the same agent stands for its memory. Another worker receives no descriptor
   (on the parent's node: ``WithoutProxies``). Its engine starts the request over from the journal, or from its
   beginning.
"""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Callable, Iterator, Sequence

import trio

from omni_actors.protocol.messages import CheckpointMemory, ControlMessage
from omni_actors.protocol.packets import Envelope
from omni_actors.supervisor.process import WorkerMailbox


class RemoteCheckpoints:
    """The proxies for the memories of one agent. drop: tells the agent to free a memory."""

    def __init__(self, drop: Callable[[int], None]) -> None:
        self._drop = drop
        self._memories: dict[tuple[int, int], int] = {}
        """The number of the memory for which a proxy stands, by the proxy's device and inode."""

    def proxy(self, memory: int, nursery: trio.Nursery) -> int:
        """Return a proxy for a memory, which the caller owns. nursery: watches the proxy. Raises OSError."""
        ours, theirs = socket.socketpair()
        file = _file_of(theirs.fileno())
        self._memories[file] = memory
        nursery.start_soon(self._watch, ours, file)
        return theirs.detach()

    def memory_of(self, fd: int) -> int | None:
        """Return the memory for which a descriptor stands; None if it is no proxy of this agent."""
        return self._memories.get(_file_of(fd))

    @trio.lowlevel.enable_ki_protection
    async def _watch(self, ours: socket.socket, file: tuple[int, int]) -> None:
        with ours:
            await trio.lowlevel.wait_readable(ours)  # nothing is ever sent: its other end was closed
        self._drop(self._memories.pop(file))


class WithoutProxies:
    """The mailbox of a worker on the parent's node, for which a proxy is no memory. See ``WorkerMailbox``."""

    def __init__(self, mailbox: WorkerMailbox) -> None:
        self._mailbox = mailbox

    @property
    def fault(self) -> str | None:
        return self._mailbox.fault

    @fault.setter
    def fault(self, why: str | None) -> None:
        self._mailbox.fault = why

    @property
    def incoming(self) -> trio.MemoryReceiveChannel[Envelope]:
        return self._mailbox.incoming

    @property
    def congested(self) -> bool:
        return self._mailbox.congested

    def post(self, message: ControlMessage, fds: Sequence[int] = (), *, wakes: bool = True) -> None:
        if isinstance(message, CheckpointMemory) and any(stat.S_ISSOCK(os.fstat(fd).st_mode) for fd in fds):
            fds = ()
        self._mailbox.post(message, fds, wakes=wakes)

    def unread(self) -> Iterator[Envelope]:
        return self._mailbox.unread()


def _file_of(fd: int) -> tuple[int, int]:
    status = os.fstat(fd)
    return status.st_dev, status.st_ino
