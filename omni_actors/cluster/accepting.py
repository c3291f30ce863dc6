"""The side that accepts: connections from their arrival until their link takes them over.

Rule 1: a connection is authenticated within ``handshake_s`` seconds, and few are not (``strangers``). A node whose
connection made room for others connects again.
Rule 2: an authenticated connection may come before its link is expected, because the two nodes are not synchronised. It
then waits for ``handshake_s`` seconds; after that it is dropped, and that node connects again.
Rule 3: without descriptors, nothing is accepted for a moment; what waits in the backlog stays there.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable
from functools import partial
from typing import Final

from omni_actors.cluster.channel import Address, Channel, Tls, listen
from omni_actors.cluster.handshake import ROLE_OF_LINKS, Acceptor, HandshakeFailed
from omni_actors.cluster.opening import Opening
from omni_actors.cluster.poller import NOTHING, READ, SOCKET, Poller
from omni_actors.cluster.strangers import Strangers

MOST_EARLY: Final = 1024
"""Authenticated connections whose link is not expected yet."""
ACCEPTED_AT_ONCE: Final = 32
PAUSE_S: Final = 0.1
"""How long no connection is accepted after there was no descriptor for one."""
_NO_ROOM: Final = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Accepting:
    """The listener, and the connections that have no link yet.

    on_link: called with the id of a link and its connection, which it owns. Returns whether that link exists; if it
    does not, the connection waits (``take``).
    """

    def __init__(
        self,
        poller: Poller,
        host: str,
        secret: bytes,
        on_link: Callable[[int, Channel], bool],
        *,
        tls: Tls | None,
        handshake_s: float,
    ) -> None:
        """Raises ValueError (not an IP address), OSError (not one of this node)."""
        self._poller, self._secret, self._on_link = poller, secret, on_link
        self._tls, self._handshake_s = tls, handshake_s
        self._listener = listen(host)
        name = self._listener.getsockname()
        self.address: Address = (name[0], name[1])
        self._strangers = Strangers[Opening]()
        """Oldest first, as are those that came early; so the first has the earliest deadline."""
        self._early: dict[int, tuple[Channel, float]] = {}
        self._again: float | None = None
        poller.watch(self._listener.fileno(), READ, self._accept)

    def take(self, link_id: int) -> Channel | None:
        """Return the connection of a link, if it came early."""
        return self._early.pop(link_id, (None, 0.0))[0]

    def due(self) -> float | None:
        """Return when ``pass_deadlines`` is to be called."""
        dues = [] if self._again is None else [self._again]
        if (oldest := next(iter(self._strangers), None)) is not None:
            dues.append(oldest.deadline)
        if self._early:
            dues.append(next(iter(self._early.values()))[1])
        return min(dues, default=None)

    def pass_deadlines(self, now: float) -> None:
        for opening in [each for each in self._strangers if each.deadline <= now]:
            self._drop(opening)
        for link_id in [link_id for link_id, (_, deadline) in self._early.items() if deadline <= now]:
            channel, _ = self._early.pop(link_id)
            self._poller.forget(channel.fileno())
            channel.reset()
        if self._again is not None and self._again <= now:
            self._again = None
            self._poller.change(self._listener.fileno(), READ, self._accept)

    def close(self) -> None:
        for opening in self._strangers:
            opening.close()
        for channel, _ in self._early.values():
            channel.reset()
        self._listener.close()

    def _accept(self, _: int) -> None:
        for _ in range(ACCEPTED_AT_ONCE):
            try:
                connection, (host, *_) = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno not in _NO_ROOM:
                    continue  # the connection was aborted before it was accepted
                self._poller.change(self._listener.fileno(), 0, self._accept)
                self._again = time.monotonic() + PAUSE_S
                return
            deadline = time.monotonic() + self._handshake_s
            acceptor = Acceptor(self._secret)
            opening = Opening(connection, acceptor, tls=self._tls, host=None, deadline=deadline)
            displaced = self._strangers.add(opening, host, acceptor)
            self._poller.watch(opening.fileno(), SOCKET, partial(self._step, opening))
            if displaced is not None:
                self._drop(displaced)

    def _step(self, opening: Opening, _: int) -> None:
        try:
            channel = opening.step()
        except (OSError, HandshakeFailed):
            self._drop(opening)
            return
        if channel is None:
            return
        link_id = opening.handshake.subject
        if opening.handshake.role != ROLE_OF_LINKS or link_id in self._early:
            self._drop(opening)
            return
        self._strangers.discard(opening)
        if self._on_link(link_id, channel):
            return
        if len(self._early) == MOST_EARLY:
            self._poller.forget(channel.fileno())
            channel.reset()
            return
        self._poller.change(channel.fileno(), NOTHING, lambda _: None)
        self._early[link_id] = channel, time.monotonic() + self._handshake_s

    def _drop(self, opening: Opening) -> None:
        self._strangers.discard(opening)
        self._poller.forget(opening.fileno())
        opening.close()
