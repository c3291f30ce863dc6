"""The descriptors that the pump waits for, each with the function that handles its events."""

from __future__ import annotations

import select
from collections.abc import Callable
from contextlib import suppress
from typing import Final, TypeAlias

READ: Final = select.EPOLLIN | select.EPOLLRDHUP | select.EPOLLHUP | select.EPOLLERR
"""Events after which a read may find something, the end or an error included."""
WRITE: Final = select.EPOLLOUT | select.EPOLLHUP | select.EPOLLERR
ENDED: Final = select.EPOLLRDHUP | select.EPOLLHUP | select.EPOLLERR
SOCKET: Final = select.EPOLLIN | select.EPOLLOUT | select.EPOLLRDHUP | select.EPOLLET
"""What a connection is watched for: each change is reported once."""
NOTHING: Final = select.EPOLLET
"""Only errors, once."""
BELL: Final = select.EPOLLIN | select.EPOLLET
"""What a doorbell is watched for. Each ring of it is reported, even if the one before was not cleared."""

Handler: TypeAlias = Callable[[int], None]


class Poller:
    """An ``epoll``.

    A handler must tolerate an event that is not its own, because the number of a closed descriptor is used again.
    """

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._handlers: dict[int, Handler] = {}

    def watch(self, fd: int, events: int, handler: Handler) -> None:
        self._handlers[fd] = handler
        self._epoll.register(fd, events)

    def change(self, fd: int, events: int, handler: Handler) -> None:
        """Watch a descriptor otherwise. If it is ready now, this is reported (again)."""
        self._handlers[fd] = handler
        self._epoll.modify(fd, events)

    def forget(self, fd: int) -> None:
        """Stop watching. The descriptor may have been closed just now. Idempotent."""
        if self._handlers.pop(fd, None) is not None:
            with suppress(OSError):
                self._epoll.unregister(fd)

    def handle(self, timeout_s: float | None) -> None:
        """Wait until a descriptor is ready or the time is over, and call the handlers. None: wait without limit."""
        for fd, events in self._epoll.poll(timeout_s):
            if (handler := self._handlers.get(fd)) is not None:
                handler(events)

    def close(self) -> None:
        self._epoll.close()
