"""The process's descriptors: a share for clients, the rest for workers.

A worker that dies must be startable however many connections are open, or its stage fails for good. So connections get
what is left when every worker, with its rings, and ``SPARE`` others have theirs.
"""

from __future__ import annotations

import logging
import os
import resource
import sys
from contextlib import suppress
from dataclasses import dataclass

SPARE = 64
"""For what is open for moments: a worker that starts, messages with descriptors, files fetched for requests."""

log = logging.getLogger("omni_actors.serve")


@dataclass(frozen=True)
class DescriptorBudget:
    """limit: how many this process may have. in_use: how many it had before it served anything."""

    limit: int
    in_use: int

    @classmethod
    def of_this_process(cls) -> DescriptorBudget:
        """Raises the soft limit to the hard one."""
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        with suppress(ValueError, OSError):  # an unlimited one may be more than the kernel allows
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return cls(sys.maxsize if soft == resource.RLIM_INFINITY else soft, len(os.listdir("/proc/self/fd")))

    def room(self, wanted: int, *, reserved: int) -> int:
        """How many of the ``wanted`` connections there may be where ``reserved`` descriptors are for workers."""
        most = max(1, self.limit - self.in_use - reserved - SPARE)
        if most < wanted:
            log.warning("only %d connections at a time: this process may have %d descriptors", most, self.limit)
        return min(wanted, most)
