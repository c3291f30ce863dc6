"""The parent's hold on the memory of a request's checkpoints.

Rules
1. The parent keeps a descriptor for each stage that has sent one, until the request ends. So the memory outlives its
   worker, and nothing of it is left behind when the request or the parent ends.
2. The parent never reads the memory. The stage's next incarnation does, and checks it (``worker.checkpoints``).
"""

from __future__ import annotations

import os


class CheckpointMemories:
    """The descriptors of one request's checkpoint memory, by stage."""

    def __init__(self) -> None:
        self._fds: dict[str, int] = {}

    def keep(self, stage: str, memory_fd: int) -> None:
        """Own this descriptor, in place of the stage's earlier one."""
        os.set_inheritable(memory_fd, False)
        earlier, self._fds[stage] = self._fds.get(stage), memory_fd
        if earlier is not None:
            os.close(earlier)

    def of(self, stage: str) -> int | None:
        """Return the stage's descriptor, which stays owned here; None if it has made no checkpoint."""
        return self._fds.get(stage)

    def close(self) -> None:
        """Close all descriptors. Idempotent."""
        while self._fds:
            os.close(self._fds.popitem()[1])
