"""Read files on this machine, from the folders that the operator allows and from nowhere else.

Rules
1. A file is opened with O_PATH first, which neither reads nor blocks. Then the open file is checked: its real path,
   after all links and ``..``, and its type. The file that was checked is the file that is read, even if its name means
   another file by then.
2. A path that does not begin in an allowed folder is not looked up.
3. Every failure gives the same error: a client must learn nothing about the other files of this machine.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable
from pathlib import Path

import trio

from omni_actors.serve.media.fetch import MediaUnavailable

_FILE_READS = trio.CapacityLimiter(4)
"""A file system that hangs blocks at most these threads."""


class AllowedFolders:
    """Reads files below ``folders``. Raises ValueError if one of them is not a folder."""

    def __init__(self, folders: Iterable[str | Path]) -> None:
        given = [Path(os.path.abspath(folder)) for folder in folders]
        self._real = [Path(os.path.realpath(folder)) for folder in given]
        self._prefixes = [*given, *self._real]
        for folder in given:
            if not folder.is_dir():
                raise ValueError(f"{str(folder)!r} is not a folder")

    async def read(self, path: str, add_bytes: Callable[[int], None]) -> bytes:
        """Return the content of a file. Raises MediaUnavailable, and what ``add_bytes`` raises.

        add_bytes: called with the file's size before it is read.
        """

        def add_from_thread(size: int) -> None:
            trio.from_thread.run_sync(add_bytes, size)

        return await trio.to_thread.run_sync(
            self._read, path, add_from_thread, abandon_on_cancel=True, limiter=_FILE_READS
        )

    def _read(self, path: str, add_bytes: Callable[[int], None]) -> bytes:
        try:
            if not _is_below(Path(os.path.normpath(path)), self._prefixes):
                raise PermissionError("the path is not in an allowed folder")
            pinned = os.open(path, os.O_PATH | os.O_CLOEXEC)
            try:
                itself = f"/proc/self/fd/{pinned}"
                found = os.fstat(pinned)
                if not stat.S_ISREG(found.st_mode) or not _is_below(Path(os.readlink(itself)), self._real):
                    raise PermissionError("no regular file in an allowed folder")
                add_bytes(found.st_size)
                with open(itself, "rb") as file:
                    return file.read(found.st_size)
            finally:
                os.close(pinned)
        except (OSError, ValueError) as error:  # ValueError: a path that no file can have
            reason = "the file does not exist, or this server may not read it"
            raise MediaUnavailable(reason, "{}_file_not_found") from error


def _is_below(path: Path, folders: Iterable[Path]) -> bool:
    return any(folder in path.parents for folder in folders)
