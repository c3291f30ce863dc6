"""A mapping of shared memory, and the views of it, which end before it does."""

from __future__ import annotations

import mmap

from ringbuf._errors import FrameBorrowed


class Mapping:
    """All of a memory file, writable, with its pages in place.

    words: the memory as 8-byte words. data: its bytes from ``offset`` on.
    what: names the memory in ``FrameBorrowed``.
    """

    def __init__(self, memory_fd: int, size: int, *, offset: int, what: str) -> None:
        """Raises OSError (no room to map ``size`` bytes)."""
        self._map = mmap.mmap(memory_fd, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        self._offset, self._what = offset, what
        self._open_views()

    def _open_views(self) -> None:
        whole = memoryview(self._map)
        self.words = whole.cast("Q")
        self.data = whole[self._offset :]

    def close(self) -> None:
        """Unmap. Idempotent. Raises FrameBorrowed, and keeps the mapping, when a view of it is alive."""
        self.words.release()
        self.data.release()
        try:
            self._map.close()
        except BufferError as error:
            self._open_views()
            raise FrameBorrowed(self._what) from error
