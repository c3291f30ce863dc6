"""The control connection of a simulated worker, as its engine loop sees it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from omni_actors.protocol import messages
from omni_actors.protocol.packets import Envelope
from omni_actors.worker.control import Command, Control

if TYPE_CHECKING:
    from omni_actors.stress.simulation.worker import SimulatedWorker


class SimulatedControl(Control):
    """A ``Control`` without a socket: the worker delivers what has arrived, and takes the notices."""

    def __init__(self, worker: SimulatedWorker) -> None:
        super().__init__()
        self._worker = worker
        self._arrived: list[tuple[messages.ControlMessage, tuple[int, ...]]] = []
        """What the socket would hold."""
        self._arrived_bell, self._command_bell = (os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC) for _ in range(2))
        """Readable while the socket would hold anything, and a command that wakes the loop."""

    def deliver(self, message: messages.ControlMessage, fds: tuple[int, ...], wakes: bool) -> None:
        """Let a message arrive. wakes: whether the loop wakes for it."""
        self._arrived.append((message, fds))
        os.eventfd_write(self._arrived_bell, 1)
        if wakes:
            os.eventfd_write(self._command_bell, 1)

    def free(self) -> None:
        """Close the bells. Call it once."""
        os.close(self._arrived_bell)
        os.close(self._command_bell)

    def add(self, notice: messages.ControlMessage, fds: tuple[int, ...] = ()) -> None:
        self._worker.own(fds)
        super().add(notice, fds)

    def warn(self, text: str) -> None:
        self._worker.note(text)

    def fileno(self) -> int:
        return self._arrived_bell

    def bell(self) -> int:
        return self._command_bell

    def commands(self) -> Sequence[Command]:
        with suppress(BlockingIOError):
            os.eventfd_read(self._arrived_bell)
        arrived, self._arrived = self._arrived, []
        return [self._worker.command(message, fds) for message, fds in arrived]

    def _write(self, notices: Sequence[Envelope]) -> None:
        for message, fds in notices:
            self._worker.notify(message, fds)
