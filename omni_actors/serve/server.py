"""The server's life: listen, load, serve, drain, end.

Rules
1. What cannot work is said before anything starts: a configuration (ConfigError), an address (CannotListen).
2. The socket listens while the stages load; until they have, work is refused and /health says how far they are. A stage
   that cannot load ends the server with StageFailed. One that fails later does not, unless that was asked for: requests
   that do not need it are served, and it is tried again.
3. The first SIGINT or SIGTERM drains: no new connections, ``drain_s`` for what is under way, then every request ends
   and its client is told why (``listener``). The second one kills; the kernel then takes the workers along. One that
   follows at once is the same one: process managers that signal a process and its group send two.
4. Clients cannot use up the process's descriptors: enough are kept to start every worker again (``descriptors``).
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import socket
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import trio
from starlette.types import ASGIApp

from omni_actors import config as configuration
from omni_actors.config import Pipeline
from omni_actors.errors import OmniError, StageFailed
from omni_actors.serve.access.api_key import normalize_key
from omni_actors.serve.access.origins import normalize_host, normalize_origin
from omni_actors.serve.app import build
from omni_actors.serve.defaults import (
    API_KEY_VARIABLE,
    DRAIN_S,
    HOST,
    MAX_BODY_BYTES,
    MAX_CONNECTIONS,
    MAX_CONNECTIONS_PER_ADDRESS,
    PORT,
)
from omni_actors.serve.http.buffered_socket import SEND_TIMEOUT_S
from omni_actors.serve.http.descriptors import DescriptorBudget
from omni_actors.serve.http.listener import Listener
from omni_actors.serve.media.loader import MediaLoader
from omni_actors.system import Health, OmniSystem

SAME_SIGNAL_S = 0.25
SEND_BUFFER_BYTES = 128 * 1024
"""The kernel doubles it. That much of an answer may wait for a client outside of all limits."""
BACKLOG = 1024

log = logging.getLogger("omni_actors.serve")


class CannotListen(OmniError):
    def __init__(self, host: str, port: int, reason: str) -> None:
        self.host, self.port = host, port
        super().__init__(f"cannot listen on {host}:{port}: {reason}")


async def serve(
    config: str | Path | Pipeline = "voice",
    *,
    host: str = HOST,
    port: int = PORT,
    api_key: str | None = None,
    max_body_bytes: int = MAX_BODY_BYTES,
    media: MediaLoader | None = None,
    allow_origins: Collection[str] = (),
    allow_hosts: Collection[str] = (),
    overrides: Mapping[str, Any] | None = None,
    drain_s: float = DRAIN_S,
    max_connections: int = MAX_CONNECTIONS,
    max_connections_per_address: int = MAX_CONNECTIONS_PER_ADDRESS,
    exit_on_failed_stage: bool = False,
    announce: Callable[[str], None] = print,
) -> None:
    """Serve a pipeline until SIGINT or SIGTERM; then every process is reaped. port 0: one that is free.

    api_key: what a client must send; None serves everybody. max_body_bytes: of a request and the files that its URLs
    name. media: where those may be; None: nowhere, so that a request brings what it needs. allow_origins: of web pages
    that may use the server. allow_hosts: which Host headers are answered; none: any. max_connections: of all clients;
    fewer where the process may not open so many files. exit_on_failed_stage: end with StageFailed when a stage is given
    up, instead of trying it again. announce: called with one line when the server listens and one when it is ready.
    Raises ValueError (a key, an origin or a host that is none), ConfigError, CannotListen, StageFailed (a stage that
    cannot load, or is given up and ``exit_on_failed_stage``).
    """
    key = None if api_key is None else normalize_key(api_key)
    origins, hosts = frozenset(map(normalize_origin, allow_origins)), frozenset(map(normalize_host, allow_hosts))
    pipeline = configuration.load(config, overrides)
    descriptors = DescriptorBudget.of_this_process()
    failure: OmniError | None = None
    async with trio.open_nursery() as nursery:
        stop: trio.Event = await nursery.start(_follow_signals)
        try:
            with _listening_socket(host, port) as listener:
                if key is None:
                    _warn_where_open(listener)
                async with OmniSystem.open(pipeline, wait_ready=False) as system:
                    server = _Server(system, listener, stop, drain_s, announce, exit_on_failed_stage)
                    app = partial(
                        build,
                        system,
                        api_key=key,
                        max_body_bytes=max_body_bytes,
                        media=media or MediaLoader(),
                        origins=origins,
                        hosts=hosts,
                    )
                    most = descriptors.room(max_connections, reserved=system.descriptors)
                    limits = {"max_connections": most, "max_per_address": max_connections_per_address}
                    await server.run(app, **limits, max_body_bytes=max_body_bytes)
        except OmniError as error:
            failure = error  # raised below as it is, not inside the nursery's exception group
        nursery.cancel_scope.cancel()
    if failure is not None:
        raise failure


async def _follow_signals(task_status: trio.TaskStatus[trio.Event]) -> None:
    stop = trio.Event()
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        task_status.started(stop)
        first = float("inf")
        async for number in signals:
            if stop.is_set() and trio.current_time() > first + SAME_SIGNAL_S:
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)
            first = min(first, trio.current_time())
            stop.set()


class _Server:
    def __init__(
        self,
        system: OmniSystem,
        listener: socket.socket,
        stop: trio.Event,
        drain_s: float,
        announce: Callable[[str], None],
        exits_on_failed_stage: bool,
    ) -> None:
        self._system, self._listener, self._stop = system, listener, stop
        self._drain_s, self._announce, self._exits_on_failed_stage = drain_s, announce, exits_on_failed_stage
        self._has_loaded = False
        self._failure: StageFailed | None = None
        host, port, *_ = listener.getsockname()
        self._url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    async def run(self, make_app: Callable[..., ASGIApp], **limits: int) -> None:
        """limits: the keyword arguments of ``Listener``."""
        app = make_app(has_loaded=lambda: self._has_loaded)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._follow_stages)
            listener = Listener(self._listener, app, self._system.metrics.registry, **limits)
            self._announce(f"listening on {self._url}; {self._system.pipeline.name!r} is loading")
            await listener.run(self._stop, self._drain_s, lambda: self._system.abort_all("the server is shutting down"))
            nursery.cancel_scope.cancel()
        if self._failure is not None:
            raise self._failure

    async def _follow_stages(self) -> None:
        """Say when all are loaded, and when one dies."""
        exits: dict[tuple[str, int], str | None] = {}
        while True:
            health = self._system.health()
            if self._system.dead_error is not None and (self._exits_on_failed_stage or not self._has_loaded):
                self._failure = self._system.dead_error
                self._stop.set()
                return
            if not self._has_loaded and health.ready:
                self._has_loaded = True
                gc.freeze()  # a full collection would look through every imported object and hold all requests up
                self._announce(f"ready: {self._url}/v1 serves {self._system.pipeline.name!r}")
            _log_exits(health, exits)
            await self._system.wait_changed()


def _log_exits(health: Health, known: dict[tuple[str, int], str | None]) -> None:
    for stage, replicas in health.stages.items():
        for replica in replicas:
            place = (stage, replica.replica)
            if replica.last_exit != known.get(place):
                known[place] = replica.last_exit
                log.warning("stage %r (replica %d): %s; %s", stage, replica.replica, replica.last_exit, replica.state)


@contextmanager
def _listening_socket(host: str, port: int) -> Iterator[socket.socket]:
    """Raises CannotListen."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[
            0
        ]
        listener = socket.socket(family, kind)
    except OSError as error:
        raise CannotListen(host, port, str(error)) from error
    with listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Connections inherit all three.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(SEND_TIMEOUT_S * 1000))
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        try:
            listener.bind(address)
            # Another server that has bound the address may not listen yet; this is where the second one is told.
            listener.listen(BACKLOG)
        except OSError as error:
            raise CannotListen(host, port, os.strerror(error.errno or 0)) from error
        yield listener


def _warn_where_open(listener: socket.socket) -> None:
    """Warn of an address that other machines reach. For servers without a key."""
    host, port, *_ = listener.getsockname()
    if not ip_address(host).is_loopback:
        message = "no API key: every machine that reaches %s port %d can use this server; set --api-key or %s"
        log.warning(message, host, port, API_KEY_VARIABLE)
