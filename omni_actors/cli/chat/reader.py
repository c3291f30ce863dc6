"""Where messages come from: a prompt on a terminal, or the lines of a pipe.

In both, a line that ends with a backslash goes on in the next line.
"""

from __future__ import annotations

import sys
from typing import Protocol

import trio

MAX_LINE_CHARACTERS = 2**20
CONTINUES = "\\"


class Reader(Protocol):
    """The source of messages."""

    async def read(self) -> str | None:
        """Return the next message; None at the end. Raises KeyboardInterrupt: the user has cleared the line."""


class PipeReader:
    """Reads messages from standard input, one in each line."""

    async def read(self) -> str | None:
        """Return the next message. After a cancellation, a thread waits for a line until the program ends."""
        lines: list[str] = []
        while True:
            line = await trio.to_thread.run_sync(sys.stdin.readline, MAX_LINE_CHARACTERS, abandon_on_cancel=True)
            if not line:
                return "\n".join(lines) if lines else None
            line = line.rstrip("\n")
            if not line.endswith(CONTINUES):
                return "\n".join([*lines, line])
            lines.append(line.removesuffix(CONTINUES))
