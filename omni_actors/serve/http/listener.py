"""Accept connections, and keep the failure of one from affecting the others.

Rules
1. An exception in a connection closes that connection and writes one log record. The server continues.
2. At the limit of all connections, the listener closes the connection that has been idle longest to make room for the
   new one; at the limit of one address (``counted_address``), the longest idle one of that address. If none is idle,
   the listener answers the new connection with 503 (with TLS, not at all) and closes it without reading. A lack of
   descriptors is logged once, and the listener accepts again after a pause. If the listening socket itself is lost, the
   listener drains and raises SocketLost.
3. Shutdown is a deadline: the listener stops accepting and closes idle connections at once. Requests in progress have
   ``drain_s`` to end. Then ``end_requests`` ends them, they have ``ERROR_RESPONSE_S`` to send their errors, and all
   connections are closed.
"""

from __future__ import annotations

import errno
import logging
import socket
import ssl
from collections import Counter
from collections.abc import Callable
from contextlib import suppress

import prometheus_client
import trio
from starlette.types import ASGIApp

from omni_actors.network_addresses import counted_address
from omni_actors.serve.http.connection import Connection, error_response
from omni_actors.serve.http.errors import HTTPError

ERROR_RESPONSE_S = 0.5
ACCEPT_RETRY_S = 0.1
"""The pause after an error of ``accept``."""
LOST = {errno.EBADF, errno.EINVAL, errno.ENOTSOCK, errno.EOPNOTSUPP}
"""Errors of ``accept`` after which the socket never accepts again."""

log = logging.getLogger("omni_actors.serve")

_FULL = HTTPError(503, "the server has too many connections", code="too_many_connections")


class SocketLost(Exception):
    """The listening socket was shut down or closed from outside; ``__cause__`` is the system's error."""


class HTTPListener:
    """Serves an ASGI application on the connections of a listening socket.

    Args:
        sock: the listening socket. ``run`` closes it on shutdown.
        app: the application.
        registry: receives the counter of refused connections.
        max_connections: the limit of connections.
        max_per_address: the limit of connections from one address.
        max_body_bytes: the largest size that a chunk of a request's body may declare.
        max_message_bytes: the limit of a message of a WebSocket.
        tls: returns the TLS context of a new connection; None: without TLS.
    """

    def __init__(
        self,
        sock: socket.socket,
        app: ASGIApp,
        registry: prometheus_client.CollectorRegistry,
        *,
        max_connections: int,
        max_per_address: int,
        max_body_bytes: int,
        max_message_bytes: int,
        tls: Callable[[], ssl.SSLContext | None] = lambda: None,
    ) -> None:
        sock.setblocking(False)
        self._socket, self._app, self._tls = sock, app, tls
        self._max_body_bytes, self._max_message_bytes = max_body_bytes, max_message_bytes
        self._max_connections, self._max_per_address = max_connections, max_per_address
        self._refused = prometheus_client.Counter(
            "omni_http_refused_connections",
            "Connections refused, by limit: total or address",
            ["limit"],
            registry=registry,
        )
        self._connections: dict[Connection, str] = {}
        """Each connection with its client's counted address."""
        self._per_address: Counter[str] = Counter()
        self._lacks_descriptors = False

    async def run(self, stop: trio.Event, drain_s: float, end_requests: Callable[[], None]) -> None:
        """Serve until ``stop`` is set, then drain. Return once every connection is closed.

        Raises SocketLost, after a drain.

        Args:
            stop: starts the shutdown.
            drain_s: the time that requests in progress have to end.
            end_requests: called when that time is over; it must end every request.
        """
        lost: OSError | None = None
        async with trio.open_nursery() as draining:
            async with trio.open_nursery() as connections:
                accepting = trio.CancelScope()

                async def drain() -> None:
                    await stop.wait()
                    accepting.cancel()
                    self._socket.close()
                    for connection in self._connections:
                        connection.stop()
                    await trio.sleep(drain_s)
                    end_requests()
                    for connection in self._connections:
                        connection.end_drain()
                    await trio.sleep(ERROR_RESPONSE_S)
                    connections.cancel_scope.cancel()

                draining.start_soon(drain)
                with accepting:
                    error = await self._accept(connections)
                    if not stop.is_set():  # else it was closed above, while a connection arrived
                        lost = error
                        stop.set()
            draining.cancel_scope.cancel()
        if lost is not None:
            raise SocketLost(lost.strerror) from lost

    async def _accept(self, nursery: trio.Nursery) -> OSError:
        """Accept connections until cancelled. Returns the error by which the socket was lost."""
        while True:
            await trio.lowlevel.wait_readable(self._socket)
            try:
                sock, (host, *_) = self._socket.accept()
            except BlockingIOError:
                continue
            except OSError as error:  # too many descriptors, too little memory, or the client has left already
                if error.errno in LOST:
                    return error
                if not self._lacks_descriptors:
                    log.warning("cannot accept a connection: %s", error)
                self._lacks_descriptors = True
                await trio.sleep(ACCEPT_RETRY_S)
                continue
            self._lacks_descriptors = False
            sock.setblocking(False)
            address = counted_address(host)
            if not self._make_room(address):
                with sock, suppress(OSError):
                    if self._tls() is None:
                        sock.send(error_response(_FULL))
                    sock.shutdown(socket.SHUT_WR)
                continue
            try:
                connection = Connection(
                    trio.socket.from_stdlib_socket(sock),
                    self._app,
                    tls=self._tls(),
                    max_body_bytes=self._max_body_bytes,
                    max_message_bytes=self._max_message_bytes,
                )
            except OSError:  # the client has reset the connection
                sock.close()
                continue
            self._connections[connection] = address
            self._per_address[address] += 1
            nursery.start_soon(self._serve_connection, connection, address)

    def _make_room(self, address: str) -> bool:
        """Return whether a client at this address may connect. Close an idle connection if that is necessary."""
        at_address_limit = self._per_address[address] >= self._max_per_address
        if len(self._connections) < self._max_connections and not at_address_limit:
            return True
        candidates = (each for each, at in self._connections.items() if not at_address_limit or at == address)
        idle = [(each.idle_since, each) for each in candidates if each.idle_since is not None]
        if idle:
            min(idle, key=lambda found: found[0])[1].stop()
        else:
            self._refused.labels("address" if at_address_limit else "total").inc()
        return bool(idle)

    async def _serve_connection(self, connection: Connection, address: str) -> None:
        try:
            await connection.serve()
        except Exception:  # rule 1
            log.exception("the connection from %s:%d failed", *connection.client)
        finally:
            connection.close()
            self._connections.pop(connection, None)
            self._per_address[address] -= 1
            if not self._per_address[address]:
                del self._per_address[address]
