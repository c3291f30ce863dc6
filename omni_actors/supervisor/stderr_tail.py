"""The last lines of a worker's stderr, for its exit, and all of them for the log."""

from __future__ import annotations

import collections
import logging
import os

import trio

LINES = 40
LONGEST_LINE = 4096


class StderrTail:
    """Keeps the last lines that a worker writes to its stderr, and logs all of them."""

    def __init__(self, read_fd: int, logger: str) -> None:
        self.lines: collections.deque[str] = collections.deque(maxlen=LINES)
        self._fd, self._log, self._pending = read_fd, logging.getLogger(logger), b""
        os.set_blocking(read_fd, False)

    @trio.lowlevel.enable_ki_protection
    async def follow(self) -> None:
        """Read until every process has closed the other end."""
        while self._read():
            await trio.lowlevel.wait_readable(self._fd)

    def drain(self) -> None:
        """Read what is there now. A child of the worker may keep the pipe open and write later; that is not read."""
        self._read()
        if self._pending:
            self._add(self._pending)
            self._pending = b""

    def _read(self) -> bool:
        """Read what is there. Return whether a process still has the other end open."""
        while True:
            try:
                data = os.read(self._fd, 65536)
            except BlockingIOError:
                return True
            if not data:
                return False
            *lines, pending = (self._pending + data).split(b"\n")
            self._pending = pending[-LONGEST_LINE:]
            for line in lines:
                self._add(line)

    def _add(self, line: bytes) -> None:
        text = line[-LONGEST_LINE:].decode(errors="replace").rstrip()
        self.lines.append(text)
        self._log.info(text)
