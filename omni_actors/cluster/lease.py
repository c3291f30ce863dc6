"""The lease of an agent: for how long its workers may run without a renewal by the parent.

Rules
1. The agent notes its own time when it asks for a renewal. The grant extends the lease to that time plus ``lease_s``,
   however long the question and the grant were on their way.
2. The parent notes its own time when it grants. That is never earlier than the question. So ``lease_s`` after it the
   lease has ended, for clocks that run equally fast. ``DRIFT`` allows for clocks that do not, and ``KILL_S`` for the
   time that the kernel takes to end the workers, however short the lease is.
3. Once the parent has given a node up, it grants nothing more. Then it waits until ``safe_at``: no worker of the node
   runs any more, and their successors may start.
4. No I/O here, and no clock: time is an argument, in seconds. Each side uses a clock that goes on while its machine is
   suspended (CLOCK_BOOTTIME). The two clocks are never compared with each other.

The method is that of C. Gray and D. Cheriton, "Leases: An Efficient Fault-Tolerant Mechanism for Distributed File
Cache Consistency" (SOSP 1989).
"""

from __future__ import annotations

import math
from typing import Final

RENEWALS: Final = 4
"""How often an agent asks for a renewal during one lease."""
DRIFT: Final = 1.1
"""How many times as long as the lease the parent waits."""
KILL_S: Final = 1.0
"""How much longer than the lease it waits at least: a dying process of a busy machine may wait for a CPU."""


def fenced_after_s(lease_s: float) -> float:
    """Return how long after the last grant no worker of the node runs any more."""
    return lease_s + max(KILL_S, (DRIFT - 1) * lease_s)


class HeldLease:
    """The agent's side."""

    def __init__(self, lease_s: float) -> None:
        self.lease_s = lease_s
        self.ends_at = -math.inf
        """When the lease ends, by the agent's clock. Before the first grant there is no lease."""

    def granted(self, asked_at: float) -> bool:
        """Take the grant of a renewal that was asked for at ``asked_at``. Return whether the lease ends later now."""
        later = asked_at + self.lease_s > self.ends_at
        self.ends_at = max(self.ends_at, asked_at + self.lease_s)
        return later

    def is_over(self, now: float) -> bool:
        """Whether the lease has ended, so that no worker may run."""
        return now >= self.ends_at


class GrantedLease:
    """The parent's side."""

    def __init__(self, lease_s: float, now: float) -> None:
        """now: a time before which nothing was granted."""
        self.lease_s, self._granted_at = lease_s, now
        self._given_up = False

    def grant(self, now: float) -> bool:
        """Return whether a renewal is granted at ``now``. It is not once the node was given up."""
        if self._given_up or self.is_silent(now):
            return False
        self._granted_at = now
        return True

    def is_silent(self, now: float) -> bool:
        """Whether no renewal was granted for the length of a lease: the node is to be given up."""
        return now >= self.silent_at

    @property
    def silent_at(self) -> float:
        """The time at which the node is to be given up, unless a renewal is granted before."""
        return self._granted_at + self.lease_s

    def give_up(self) -> None:
        """Grant nothing more."""
        self._given_up = True

    @property
    def safe_at(self) -> float:
        """The time after which no worker of the node can run, unless another renewal is granted."""
        return self._granted_at + fenced_after_s(self.lease_s)
