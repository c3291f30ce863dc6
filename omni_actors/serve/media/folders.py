"""Files on this machine, from folders that the operator allows and from nowhere else.

Rules
1. A file is pinned first (O_PATH: that neither reads nor waits, whatever is there) and then judged: by where it really
   is, all links and ``..`` behind it, and by what it is. What was judged is what is read, whatever its name means then.
2. A path that does not even begin in an allowed folder is not looked up.
3. Whatever is wrong with a path, the client hears the same: what else is on this machine is none of its business.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable
from pathlib import Path

import trio

from omni_actors.serve.media.fetch import MediaUnavailable

_READERS = trio.CapacityLimiter(4)
"""A file system that hangs keeps its threads: these, and no others."""


class AllowedFolders:
    """Raises ValueError where one of ``folders`` is none."""

    def __init__(self, folders: Iterable[str | Path]) -> None:
        given = [Path(os.path.abspath(folder)) for folder in folders]
        self._real = [Path(os.path.realpath(folder)) for folder in given]
        self._begin = [*given, *self._real]
        for folder in given:
            if not folder.is_dir():
                raise ValueError(f"{str(folder)!r} is not a folder")

    async def read(self, path: str, hold: Callable[[int], None]) -> bytes:
        """hold: called with the file's size before it is read; what it raises ends this. Raises MediaUnavailable."""

        def hold_outside(size: int) -> None:
            trio.from_thread.run_sync(hold, size)

        return await trio.to_thread.run_sync(self._read, path, hold_outside, abandon_on_cancel=True, limiter=_READERS)

    def _read(self, path: str, hold: Callable[[int], None]) -> bytes:
        try:
            if not _is_below(Path(os.path.normpath(path)), self._begin):
                raise _not_here()
            pinned = os.open(path, os.O_PATH | os.O_CLOEXEC)
            try:
                itself = f"/proc/self/fd/{pinned}"
                found = os.fstat(pinned)
                if not stat.S_ISREG(found.st_mode) or not _is_below(Path(os.readlink(itself)), self._real):
                    raise _not_here()
                hold(found.st_size)
                with open(itself, "rb") as file:
                    return file.read(found.st_size)
            finally:
                os.close(pinned)
        except (OSError, ValueError) as error:  # ValueError: a name that no file can have
            raise _not_here() from error


def _not_here() -> MediaUnavailable:
    return MediaUnavailable("there is no such file, or none that this server may read", "{}_file_not_found")


def _is_below(path: Path, folders: Iterable[Path]) -> bool:
    return any(folder in path.parents for folder in folders)
