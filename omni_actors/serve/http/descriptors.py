"""The budget of file descriptors: connections get what the workers do not need.

A dead worker must be restartable however many connections are open; otherwise its stage fails for good. So connections
share what is left after every worker with its rings, and ``SPARE`` other descriptors.
"""

from __future__ import annotations

import logging
import os
import resource
import sys
from contextlib import suppress
from dataclasses import dataclass

SPARE = 64
"""For short-lived descriptors: a worker that starts, messages with descriptors, files fetched for requests."""

log = logging.getLogger("omni_actors.serve")


@dataclass(frozen=True)
class DescriptorBudget:
    """limit: the most descriptors that this process may have. in_use: how many it had before it served anything."""

    limit: int
    in_use: int

    @classmethod
    def of_this_process(cls) -> DescriptorBudget:
        """Raise the soft limit to the hard limit, and measure what is in use."""
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        with suppress(ValueError, OSError):  # an unlimited hard limit may be above what the kernel allows
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return cls(sys.maxsize if soft == resource.RLIM_INFINITY else soft, len(os.listdir("/proc/self/fd")))

    def max_connections(self, wanted: int, *, reserved: int) -> int:
        """Return how many of ``wanted`` connections are possible. reserved: descriptors that the workers need."""
        most = max(1, self.limit - self.in_use - reserved - SPARE)
        if most < wanted:
            log.warning("at most %d connections: this process may have only %d descriptors", most, self.limit)
        return min(wanted, most)
