"""Accepts connections, and keeps what happens in one of them away from all others.

Rules
1. Whatever a connection raises closes that connection, with one log record; the server goes on.
2. Where all connections are taken, the one that is idle for the longest time is closed for a new one; where one
   address has its share, one of its own. Where none is idle, the new one is told so and closed at once, unread. Running
   out of descriptors is logged once, and accepting goes on after a pause.
3. Shutdown is a deadline: no new connections, idle ones closed at once, ``drain_s`` for requests under way, then they
   are ended (``end_requests``), then ``CUT_S`` to send their errors, then all connections are closed.
"""

from __future__ import annotations

import logging
import socket
from collections import Counter
from collections.abc import Callable
from contextlib import suppress

import prometheus_client
import trio
from starlette.types import ASGIApp

from omni_actors.serve.http.connection import Connection, refusal
from omni_actors.serve.http.errors import HTTPError

CUT_S = 0.5
ACCEPT_AGAIN_S = 0.1
"""After an error of ``accept``."""

log = logging.getLogger("omni_actors.serve")

_FULL = HTTPError(503, "the server has no connection left", type="server_error", code="too_many_connections")


class Listener:
    """Serves ``app`` on the connections of a listening socket, which the caller closes too, if it likes.

    registry: gets a counter of the connections that are refused at a limit.
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
    ) -> None:
        sock.setblocking(False)
        self._socket, self._app, self._max_body_bytes = sock, app, max_body_bytes
        self._max_connections, self._max_per_address = max_connections, max_per_address
        self._refused = prometheus_client.Counter(
            "omni_http_refused_connections",
            "Connections refused, by limit (total, address)",
            ["limit"],
            registry=registry,
        )
        self._connections: set[Connection] = set()
        self._of_address: Counter[str] = Counter()
        self._is_short = False

    async def run(self, stop: trio.Event, drain_s: float, end_requests: Callable[[], None]) -> None:
        """Until ``stop`` is set and the connections have ended or were cut."""
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
                    await trio.sleep(CUT_S)
                    connections.cancel_scope.cancel()

                draining.start_soon(drain)
                with accepting:
                    await self._accept(connections)
            draining.cancel_scope.cancel()

    async def _accept(self, nursery: trio.Nursery) -> None:
        while True:
            await trio.lowlevel.wait_readable(self._socket)
            try:
                sock, (address, *_) = self._socket.accept()
            except BlockingIOError:
                continue
            except OSError as error:  # no descriptors, no memory, or a client that was quick to leave
                if not self._is_short:
                    log.warning("a connection cannot be accepted: %s", error)
                self._is_short = True
                await trio.sleep(ACCEPT_AGAIN_S)
                continue
            self._is_short = False
            sock.setblocking(False)
            if not self._make_room(address):
                with sock, suppress(OSError):
                    sock.send(refusal(_FULL))
                    sock.shutdown(socket.SHUT_WR)
                continue
            try:
                connection = Connection(trio.socket.from_stdlib_socket(sock), self._app, self._max_body_bytes)
            except OSError:  # its client has reset it
                sock.close()
                continue
            self._connections.add(connection)
            self._of_address[address] += 1
            nursery.start_soon(self._attend, connection, address)

    def _make_room(self, address: str) -> bool:
        """Whether there is a connection left for a client at this address, where need be an idle one."""
        has_share = self._of_address[address] >= self._max_per_address
        if len(self._connections) < self._max_connections and not has_share:
            return True
        candidates = (each for each in self._connections if not has_share or each.client[0] == address)
        idle = [(each.idle_since, each) for each in candidates if each.idle_since is not None]
        if idle:
            min(idle, key=lambda found: found[0])[1].stop()
        else:
            self._refused.labels("address" if has_share else "total").inc()
        return bool(idle)

    async def _attend(self, connection: Connection, address: str) -> None:
        try:
            await connection.serve()
        except Exception:  # one connection must not end the server
            log.exception("a connection from %s:%d ended", *connection.client)
        finally:
            connection.close()
            self._connections.discard(connection)
            self._of_address[address] -= 1
            if not self._of_address[address]:
                del self._of_address[address]
