"""The connections of one listener that are not authenticated yet, and which of them makes room for a new one.

Rule 1: there are at most ``MOST_STRANGERS``, so a flood of connections costs bounded descriptors and memory.
Rule 2: one more takes the place of another one: of the address that has the most; among those, of one that has not
said hello, if there is one; among those, of the oldest. The addresses of a /64 of IPv6 count as one. So a flood from
fewer addresses than there are places takes none from a node with another address. A flood that says nothing takes none
from a node at its own address that has said hello.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Final, Generic, TypeVar

from omni_actors.cluster.handshake import Acceptor
from omni_actors.network_addresses import counted_address

MOST_STRANGERS: Final = 64
BACKLOG: Final = 256
"""How many connections wait for the parent to accept them. In a flood they wait in turn; with the kernel's 4096, for
longer than an agent waits for the answer to its hello."""

T = TypeVar("T")


class Strangers(Generic[T]):
    """The connections, oldest first. The caller chooses what stands for a connection."""

    def __init__(self) -> None:
        self._all: dict[T, tuple[str, Acceptor]] = {}

    def __iter__(self) -> Iterator[T]:
        return iter(self._all)

    def add(self, stranger: T, host: str, acceptor: Acceptor) -> T | None:
        """Note a new connection. Return the one that makes room for it, which is forgotten; the caller closes it.

        host: the address of the other side. acceptor: the connection's handshake.
        """
        host = counted_address(host)
        displaced = self._to_displace(host) if len(self._all) == MOST_STRANGERS else None
        if displaced is not None:
            del self._all[displaced]
        self._all[stranger] = host, acceptor
        return displaced

    def discard(self, stranger: T) -> None:
        """Forget a connection: it is authenticated, or closed. Idempotent."""
        self._all.pop(stranger, None)

    def _to_displace(self, newest: str) -> T:
        """Return the connection that makes room for one of the address ``newest``."""
        of_host = Counter([newest, *(host for host, _ in self._all.values())])

        def order(stranger: T) -> tuple[int, bool]:
            host, acceptor = self._all[stranger]
            return of_host[host], not acceptor.has_hello

        return max(self._all, key=order)  # the first of equals
