"""The messages of a worker for its parent."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from omni_actors.protocol.messages import ControlMessage


class Notices:
    """Collects messages for the parent, so that those of a turn are sent together. Only for the engine's thread.

    write: sends messages in order; it may block.
    """

    def __init__(self, write: Callable[[Sequence[ControlMessage]], None]) -> None:
        self._write = write
        self._waiting: list[ControlMessage] = []

    def add(self, message: ControlMessage) -> None:
        """Add a message to those that are sent next."""
        self._waiting.append(message)

    def send(self, *last: ControlMessage) -> None:
        """Send what was added, and then ``last``."""
        if waiting := [*self._waiting, *last]:
            self._waiting = []
            self._write(waiting)
