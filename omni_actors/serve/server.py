"""The server's life: listen, load, serve, drain, end.

Rules
1. What cannot work is said before anything starts: a configuration (ConfigError), an address (CannotListen).
2. The socket listens while the stages load; until they have, work is refused and /health says how far they are. A stage
   that cannot load ends the server with StageFailed. One that fails later does not: what goes without it goes on.
3. The first SIGINT or SIGTERM drains: no new connections, ``drain_s`` for what is under way, then it is cancelled. The
   second one kills; the kernel then takes the workers along. One that follows at once is the same one: process managers
   that signal a process and its group send two.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import socket
import stat
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import hypercorn.config
import hypercorn.trio
import trio

from omni_actors import config as configuration
from omni_actors.config import Pipeline
from omni_actors.errors import OmniError, StageFailed
from omni_actors.serve.app import build
from omni_actors.serve.defaults import API_KEY_VARIABLE, DRAIN_S, HOST, MAX_BODY_BYTES, PORT
from omni_actors.serve.keys import clean_key
from omni_actors.serve.media import Media
from omni_actors.serve.origins import clean_host, clean_origin
from omni_actors.system import Health, OmniSystem

if TYPE_CHECKING:
    from hypercorn.typing import Framework

CUT_S = 0.5
"""After the drain: connections to clients that do not even read are shut then."""
SAME_SIGNAL_S = 0.25
UNREAD_S = 60
"""A client that takes nothing off its connection for so long is dropped."""

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
    media: Media | None = None,
    allow_origins: Collection[str] = (),
    allow_hosts: Collection[str] = (),
    overrides: Mapping[str, Any] | None = None,
    drain_s: float = DRAIN_S,
    announce: Callable[[str], None] = print,
) -> None:
    """Serve a pipeline until SIGINT or SIGTERM; then every process is reaped. port 0: one that is free.

    api_key: what a client must send; None serves everybody. max_body_bytes: of a request and the files that its URLs
    name. media: where those may be; None: nowhere, so that a request brings what it needs. allow_origins: of web pages
    that may use the server. allow_hosts: which Host headers are answered; none: any. announce: called with one line
    when the server listens and one when it is ready.
    Raises ValueError (a key, an origin or a host that is none), ConfigError, CannotListen, StageFailed (a stage that
    cannot load).
    """
    key = None if api_key is None else clean_key(api_key)
    origins, hosts = frozenset(map(clean_origin, allow_origins)), frozenset(map(clean_host, allow_hosts))
    pipeline = configuration.load(config, overrides)
    failure: OmniError | None = None
    async with trio.open_nursery() as nursery:
        stop: trio.Event = await nursery.start(_follow_signals)
        try:
            with _listening_socket(host, port) as listener:
                if key is None:
                    _warn_where_open(listener)
                async with OmniSystem.open(pipeline, wait_ready=False) as system:
                    server = _Server(system, listener, stop, drain_s, announce)
                    await server.run(key, max_body_bytes, media or Media(), origins, hosts)
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
    ) -> None:
        self._system, self._listener, self._stop = system, listener, stop
        self._drain_s, self._announce = drain_s, announce
        self._has_loaded = False
        self._failure: StageFailed | None = None
        host, port, *_ = listener.getsockname()
        self._port = port
        self._url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    async def run(
        self,
        api_key: str | None,
        max_body_bytes: int,
        media: Media,
        origins: Collection[str],
        hosts: Collection[str],
    ) -> None:
        app = build(
            self._system,
            api_key=api_key,
            max_body_bytes=max_body_bytes,
            media=media,
            has_loaded=lambda: self._has_loaded,
            origins=origins,
            hosts=hosts,
        )
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._follow_stages)
            nursery.start_soon(self._cut_those_left)
            framework = cast("Framework", app)  # Starlette's names for the same types
            serve_http = partial(
                hypercorn.trio.serve, framework, self._http_config(), shutdown_trigger=self._stop.wait, mode="asgi"
            )
            async with trio.open_nursery() as connections:
                await connections.start(serve_http)
                self._announce(f"listening on {self._url}; {self._system.pipeline.name!r} is loading")
            nursery.cancel_scope.cancel()
        if self._failure is not None:
            raise self._failure

    def _http_config(self) -> hypercorn.config.Config:
        config = hypercorn.config.Config()
        config.bind = [f"fd://{self._listener.detach()}"]  # hypercorn closes it, first of all when it drains
        config.graceful_timeout = self._drain_s
        config.loglevel = "WARNING"
        config.include_server_header = False
        return config

    async def _follow_stages(self) -> None:
        """Say when all are loaded, and when one dies."""
        exits: dict[tuple[str, int], str | None] = {}
        while True:
            health = self._system.health()
            if not self._has_loaded and self._system.dead_error is not None:
                self._failure = self._system.dead_error
                self._stop.set()
                return
            if not self._has_loaded and health.ready:
                self._has_loaded = True
                gc.freeze()  # a full collection would look through every imported object and hold all requests up
                self._announce(f"ready: {self._url}/v1 serves {self._system.pipeline.name!r}")
            _log_exits(health, exits)
            await self._system.wait_changed()

    async def _cut_those_left(self) -> None:
        """hypercorn's sends cannot be cancelled: one to a client that does not read would hold the server up."""
        await self._stop.wait()
        await trio.sleep(self._drain_s + CUT_S)
        _cut_connections(self._port)


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
        # Connections inherit both.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNREAD_S * 1000)
        try:
            listener.bind(address)
            # Another server that has bound the address may not listen yet; this is where the second one is told.
            listener.listen()
        except OSError as error:
            raise CannotListen(host, port, os.strerror(error.errno or 0)) from error
        yield listener


def _warn_where_open(listener: socket.socket) -> None:
    """Warn of an address that other machines reach. For servers without a key."""
    host, port, *_ = listener.getsockname()
    if not ip_address(host).is_loopback:
        message = "no API key: every machine that reaches %s port %d can use this server; set --api-key or %s"
        log.warning(message, host, port, API_KEY_VARIABLE)


def _cut_connections(port: int) -> None:
    for connection in _connections(port):
        # One that its peer has reset is no longer connected (ENOTCONN): that is as good.
        with connection, suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)


def _connections(port: int) -> Iterator[socket.socket]:
    """Duplicates of this process's connections on a local port. hypercorn keeps them to itself."""
    for name in os.listdir("/proc/self/fd"):
        try:
            fd = os.dup(int(name))
        except OSError:
            continue  # the listing's own descriptor
        if not stat.S_ISSOCK(os.fstat(fd).st_mode):
            os.close(fd)
            continue
        connection = socket.socket(fileno=fd)
        is_ours = (
            connection.family in (socket.AF_INET, socket.AF_INET6)
            and connection.type == socket.SOCK_STREAM
            and not connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            and connection.getsockname()[1] == port
        )
        if is_ours:
            yield connection
        else:
            connection.close()
