"""The last lines of a worker's stderr, for its exit, and all of them for the log."""

from __future__ import annotations

import collections
import logging
import os

import trio

LINES = 40
"""How many lines of a worker's stderr are kept to explain its death."""
LONGEST_LINE = 4096
"""How many bytes of a line are kept: its last ones."""
READ_BYTES = 4096
"""What is read in one turn of the event loop, so that a worker that writes without end takes no turn from others."""
PIPE_BYTES = 65536
"""What a pipe contains at most."""


class StderrTail:
    """Keeps the last lines that a worker writes to its stderr, and logs all of them."""

    def __init__(self, read_fd: int, logger: str) -> None:
        self.lines: collections.deque[str] = collections.deque(maxlen=LINES)
        self._fd, self._log, self._pending = read_fd, logging.getLogger(logger), b""
        os.set_blocking(read_fd, False)

    @trio.lowlevel.enable_ki_protection
    async def follow(self) -> None:
        """Read until every process has closed the other end."""
        while self._read(READ_BYTES):
            await trio.lowlevel.wait_readable(self._fd)

    def drain(self) -> None:
        """Read what is there now. A child of the worker may keep the pipe open and write on; that is not read."""
        self._read(PIPE_BYTES)
        if self._pending:
            self._add(self._pending)
            self._pending = b""

    def _read(self, size: int) -> bool:
        """Read up to ``size`` bytes of what is there. Return whether a process still has the other end open."""
        try:
            data = os.read(self._fd, size)
        except BlockingIOError:
            return True
        *lines, pending = (self._pending + data).split(b"\n")
        self._pending = pending[-LONGEST_LINE:]
        for line in lines:
            self._add(line)
        return bool(data)

    def _add(self, line: bytes) -> None:
        text = line[-LONGEST_LINE:].decode(errors="replace").rstrip()
        self.lines.append(text)
        self._log.info(text)
