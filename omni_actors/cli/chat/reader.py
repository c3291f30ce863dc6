"""Where messages come from: a prompt on a terminal, or the lines of a pipe.

In both, a line that ends with a backslash goes on in the next line.
"""

from __future__ import annotations

import re
import sys
from io import TextIOWrapper
from typing import Protocol

import trio

from omni_actors.errors import OmniError

MAX_MESSAGE_CHARACTERS = 2**20
"""The most characters of a message from a pipe, with its line ends."""
CONTINUES = "\\"
_SURROGATE = re.compile(r"[\ud800-\udfff]")


class MessageTooLong(OmniError):
    """A message from a pipe is longer than ``MAX_MESSAGE_CHARACTERS``. It was read to its end, and is not sent."""

    def __init__(self) -> None:
        super().__init__(f"a message is longer than {MAX_MESSAGE_CHARACTERS} characters; it was not sent")


def with_replacements(text: str) -> str:
    """Return a text with U+FFFD for each lone surrogate, which stands for a byte that is not UTF-8."""
    return _SURROGATE.sub("\ufffd", text)


class Reader(Protocol):
    """The source of messages."""

    async def read(self) -> str | None:
        """Return the next message; None at the end.

        Raises KeyboardInterrupt (the user has cleared the line) and MessageTooLong.
        """


class PipeReader:
    """Reads messages from standard input, one in each line, as UTF-8. Wrong bytes become U+FFFD."""

    def __init__(self) -> None:
        assert isinstance(sys.stdin, TextIOWrapper)
        sys.stdin.reconfigure(encoding="utf-8", errors="replace")

    async def read(self) -> str | None:
        """Return the next message; None at the end. Raises MessageTooLong.

        After a cancellation, a thread waits for a line until the program ends.
        """
        lines, size = list[str](), 0
        while line := await trio.to_thread.run_sync(_read_line, abandon_on_cancel=True):
            size += len(line)
            line = line.removesuffix("\n")
            if size <= MAX_MESSAGE_CHARACTERS:
                lines.append(line.removesuffix(CONTINUES))
            if not line.endswith(CONTINUES):
                break
        if size > MAX_MESSAGE_CHARACTERS:
            raise MessageTooLong
        return "\n".join(lines) if lines else None


def _read_line() -> str:
    """Return the next line of standard input; "" at the end.

    Of a line that is longer than a message may be, only the beginning is returned. The rest is read, and dropped.
    """
    line = piece = sys.stdin.readline(MAX_MESSAGE_CHARACTERS + 1)
    while len(piece) > MAX_MESSAGE_CHARACTERS and not piece.endswith("\n"):
        piece = sys.stdin.readline(MAX_MESSAGE_CHARACTERS + 1)
    return line
