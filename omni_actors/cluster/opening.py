"""A connection of a link until it is open: on the side that accepts, until the other side is authenticated; on the
side that connects, until the other side has said, too, that its end of the link is open (``link.ALIVE``).

Rule 1: it costs this process one descriptor, at most ``handshake.MOST_BYTES`` bytes, what OpenSSL keeps of a connection
with TLS (below 100 kB), and no thread.
Rule 2: it does not wait. What does not fit into the socket's buffer, a few bytes on a new connection, is a failure.
"""

from __future__ import annotations

import socket

from omni_actors.cluster.channel import Channel, Tls, is_connected, open_channel
from omni_actors.cluster.handshake import Connector, Handshake
from omni_actors.cluster.link import ALIVE


class Opening:
    """A connection of a link, until both sides are authenticated and the link is open.

    deadline: when the pump gives it up, by the pump's clock.
    """

    def __init__(
        self, connection: socket.socket, handshake: Handshake, *, tls: Tls | None, host: str | None, deadline: float
    ) -> None:
        """connection: connected, or connecting. host: the other node's, on the side that connects; else None."""
        self.handshake, self.deadline = handshake, deadline
        self._socket, self._tls, self._host = connection, tls, host
        self._channel: Channel | None = None
        self._to_send = handshake.hello if isinstance(handshake, Connector) else b""
        self._received = bytearray()
        self._awaits_sign = isinstance(handshake, Connector)

    @property
    def authenticated(self) -> bool:
        """Whether the other side is. On the side that connects, the sign that the link is open may be missing yet."""
        return not self.handshake.wanted

    def fileno(self) -> int:
        return self._socket.fileno() if self._channel is None else self._channel.fileno()

    def step(self) -> Channel | None:
        """Go on after the descriptor became ready. Returns the connection once nothing more is awaited.

        Raises OSError (the connection), HandshakeFailed (the other side).
        """
        if self._channel is None:
            if not is_connected(self._socket):
                return None
            self._channel = open_channel(self._socket, self._tls, self._host)
        while self._send(self._channel):
            if self.authenticated and not self._awaits_sign:
                return self._channel
            if not self._receive(self._channel):
                return None
        return None

    def close(self) -> None:
        """Close the connection. Idempotent."""
        if self._channel is None:
            self._socket.close()
        else:
            self._channel.reset()

    def _send(self, channel: Channel) -> bool:
        """Send what is to be sent. Returns False while TLS is not ready for it."""
        while self._to_send:
            if (sent := channel.send([self._to_send])) is None:
                return False
            self._to_send = self._to_send[sent:]
        return True

    def _receive(self, channel: Channel) -> bool:
        """Receive what the handshake wants, or then the sign. Returns whether there was something."""
        missing = (self.handshake.wanted or len(ALIVE)) - len(self._received)
        buffer = bytearray(missing)
        count = channel.receive([memoryview(buffer)])
        if count is None:
            return False
        if not count:
            raise ConnectionResetError("the other side closed the connection before the link was open")
        if self.authenticated:
            self._awaits_sign = False
            return True
        self._received += buffer[:count]
        if count == missing:
            data, self._received = bytes(self._received), bytearray()
            self._to_send = self.handshake.receive(data)
        return True
