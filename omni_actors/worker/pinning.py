"""Page-locking the rings of a worker that computes on a CUDA device, so that copies to and from it are plain DMA.

Rule 1: page-locking is an optimisation: where it fails, the worker writes one line to its log and goes on without.
Rule 2: no library is imported here. The engine has loaded its CUDA runtime before the first ring arrives.
"""

from __future__ import annotations

from collections.abc import Callable

from ringbuf import CudaFailed, Ring


class Pinning:
    """Page-locks rings.

    device: what the engine computes on, as in the configuration ("cpu", "cuda", "cuda:1").
    enabled: the pipeline's ``pin_rings``. warn: writes a line to the worker's log.
    """

    def __init__(self, device: str, *, enabled: bool, warn: Callable[[str], None]) -> None:
        kind, _, index = device.partition(":")
        self._device = int(index) if index.isdecimal() else None
        self._wanted, self._warn = enabled and kind == "cuda", warn

    def pin(self, ring: Ring) -> None:
        """Page-lock a ring until it is closed. After a first failure this does nothing."""
        if not self._wanted:
            return
        try:
            ring.register_cuda(self._device)
        except CudaFailed as error:
            self._wanted = False
            self._warn(f"the rings of this worker are not page-locked: {error}")

    def close(self, ring: Ring) -> None:
        """Close a ring. Raises FrameBorrowed."""
        try:
            ring.close()
        except CudaFailed as error:  # all else is closed
            self._warn(f"a ring's memory could not be unregistered: {error}")


UNPINNED = Pinning("cpu", enabled=False, warn=print)
"""Page-locks nothing."""
