"""A worker's part of the locks of its devices (``platform/device_locks.py``)."""

from __future__ import annotations

import os
from collections.abc import Sequence


class InheritedLocks:
    """A worker's part of its locks. fds: the inherited descriptors, which it owns."""

    def __init__(self, fds: Sequence[int]) -> None:
        self._fds = list(fds)
        for fd in fds:
            os.set_inheritable(fd, False)
        os.register_at_fork(after_in_child=self.release)  # a child process would hold the locks as long as it lives

    def release(self) -> None:
        """Release the locks. Harmless if they are released already."""
        while self._fds:
            os.close(self._fds.pop())
