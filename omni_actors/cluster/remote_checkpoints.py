"""Checkpoints of workers on another node: the memory stays there, and the parent has a *proxy* for each.

Rules
1. The supervisor and the orchestrator own a descriptor of each memory and close it when they need it no more. Here that
   is a proxy: one end of a socket pair. When it is closed, the agent is told to free the memory.
2. A proxy that is posted to a worker of the same agent stands for its memory. Another worker receives nothing:
   its engine starts the request over from the journal, or from its beginning.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable

import trio


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


def _file_of(fd: int) -> tuple[int, int]:
    status = os.fstat(fd)
    return status.st_dev, status.st_ino
