"""How glibc's allocator treats the memory that a process frees."""

from __future__ import annotations

import ctypes
import os

MOST_BYTES = 32 * 1024**2
"""The largest value that mallopt(3) allows for the size of a block whose memory goes back to the kernel at once."""
KEPT_BYTES = 64 * 1024**2
"""When more than this is free at the end of a heap, it goes back to the kernel."""
SETTINGS = "GLIBC_TUNABLES", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"
"""Environment variables by which an operator may set the same."""

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


def keep_freed_memory(below: int = MOST_BYTES) -> None:
    """Let the process reuse the memory of large blocks that it frees, such as chunks and tensors.

    glibc gives it back to the kernel, which clears new pages for the next block; for 1 MiB this takes as long as a
    copy. The defaults are the values that glibc arrives at by itself once a process has freed a block of nearly 32 MiB.
    Threads may have heaps of their own, and each keeps so much. This has no effect with another C library, or if the
    environment has one of ``SETTINGS``.

    below: the memory of a block of this many bytes or more still goes back. A smaller ``bytearray`` that grows may be
    copied each time; the pages of a larger one are moved.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None and not any(name in os.environ for name in SETTINGS):
        mallopt(_M_MMAP_THRESHOLD, below)
        mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES)
