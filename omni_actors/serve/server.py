"""The life cycle of the server: listen, load, serve, drain, end.

Rules
1. A bad configuration (ConfigError) or address (CannotListen) is reported before anything starts.
2. The socket listens while the stages load. Until all have loaded, requests for the pipeline are refused, and /health
   shows the progress. A stage that cannot load ends the server with StageFailed. A stage that fails later does so only
   with ``exit_on_failed_stage``. Otherwise requests that do not need the stage are served, and it is tried again.
3. The first SIGINT or SIGTERM starts the drain: no new connections, ``drain_s`` for requests in progress, then every
   request ends with an error (``http.listener``). The second signal kills the process, and the kernel then kills the
   workers. A signal within ``DUPLICATE_SIGNAL_S`` of the first is the same one: process managers that signal a process
   and its group send two.
4. Clients cannot use up the process's descriptors: the server reserves enough to restart every worker
   (``http.descriptors``).
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
from omni_actors.serve import defaults
from omni_actors.serve.access.api_key import normalize_key
from omni_actors.serve.access.origins import normalize_host, normalize_origin
from omni_actors.serve.app import build
from omni_actors.serve.http.buffered_socket import SEND_TIMEOUT_S
from omni_actors.serve.http.descriptors import DescriptorBudget
from omni_actors.serve.http.listener import Listener
from omni_actors.serve.media.loader import MediaLoader
from omni_actors.system import Health, OmniSystem

DUPLICATE_SIGNAL_S = 0.25
SEND_BUFFER_BYTES = 128 * 1024
"""The kernel doubles it. This much of a response can wait for a client without being counted in any limit."""
BACKLOG = 1024

log = logging.getLogger("omni_actors.serve")


class CannotListen(OmniError):
    """The server cannot listen on its address."""

    def __init__(self, host: str, port: int, reason: str) -> None:
        self.host, self.port = host, port
        super().__init__(f"cannot listen on {host}:{port}: {reason}")


async def serve(
    config: str | Path | Pipeline = "voice",
    *,
    host: str = defaults.HOST,
    port: int = defaults.PORT,
    api_key: str | None = None,
    max_body_bytes: int = defaults.MAX_BODY_BYTES,
    media: MediaLoader | None = None,
    allow_origins: Collection[str] = (),
    allow_hosts: Collection[str] = (),
    overrides: Mapping[str, Any] | None = None,
    drain_s: float = defaults.DRAIN_S,
    max_connections: int = defaults.MAX_CONNECTIONS,
    max_connections_per_address: int = defaults.MAX_CONNECTIONS_PER_ADDRESS,
    exit_on_failed_stage: bool = False,
    announce: Callable[[str], None] = print,
) -> None:
    """Serve a pipeline until SIGINT or SIGTERM. Every worker has ended when this returns.

    Args:
        config: a pipeline, or its name or path.
        host, port: the address to listen on. Port 0: a free port.
        api_key: the key that clients must send. None: no key.
        max_body_bytes: the limit of a request's body and the files that its URLs name.
        media: loads files at URLs. None: only files in the body are allowed.
        allow_origins: the origins whose web pages may use the server.
        allow_hosts: the accepted values of the header Host, without a port. Empty: all.
        overrides: values that replace those of ``config``, by their path.
        drain_s: the time that requests in progress have to end after the first signal.
        max_connections: the limit of connections, which is lower if the process may not open so many files.
        max_connections_per_address: the limit of connections from one address.
        exit_on_failed_stage: raise StageFailed when a stage is given up, instead of trying it again.
        announce: called with one line when the server listens, and with one when it is ready.

    Raises ValueError (a bad key, origin or host), ConfigError, CannotListen, StageFailed (a stage that cannot load, or
    see ``exit_on_failed_stage``). Cancellation ends all requests at once, and stops the workers.
    """
    key = None if api_key is None else normalize_key(api_key)
    origins, hosts = frozenset(map(normalize_origin, allow_origins)), frozenset(map(normalize_host, allow_hosts))
    pipeline = configuration.load(config, overrides)
    descriptors = DescriptorBudget.of_this_process()
    failure: OmniError | None = None
    async with trio.open_nursery() as nursery:
        stop: trio.Event = await nursery.start(_watch_signals)
        try:
            with _listening_socket(host, port) as listener:
                if key is None:
                    _warn_if_public(listener)
                async with OmniSystem.open(pipeline, wait_ready=False) as system:
                    server = _Server(
                        system,
                        listener,
                        stop,
                        drain_s=drain_s,
                        announce=announce,
                        exit_on_failed_stage=exit_on_failed_stage,
                    )
                    app = partial(
                        build,
                        system,
                        api_key=key,
                        max_body_bytes=max_body_bytes,
                        media=media or MediaLoader(),
                        origins=origins,
                        hosts=hosts,
                    )
                    most = descriptors.max_connections(max_connections, reserved=system.descriptors)
                    limits = {"max_connections": most, "max_per_address": max_connections_per_address}
                    await server.run(app, **limits, max_body_bytes=max_body_bytes)
        except OmniError as error:
            failure = error  # raised below, outside the nursery's exception group
        nursery.cancel_scope.cancel()
    if failure is not None:
        raise failure


async def _watch_signals(task_status: trio.TaskStatus[trio.Event]) -> None:
    stop = trio.Event()
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        task_status.started(stop)
        first = float("inf")
        async for number in signals:
            if stop.is_set() and trio.current_time() > first + DUPLICATE_SIGNAL_S:
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)
            first = min(first, trio.current_time())
            stop.set()


class _Server:
    """A listening server with its running pipeline."""

    def __init__(
        self,
        system: OmniSystem,
        listener: socket.socket,
        stop: trio.Event,
        *,
        drain_s: float,
        announce: Callable[[str], None],
        exit_on_failed_stage: bool,
    ) -> None:
        self._system, self._listener, self._stop = system, listener, stop
        self._drain_s, self._announce, self._exit_on_failed_stage = drain_s, announce, exit_on_failed_stage
        self._has_loaded = False
        self._failure: StageFailed | None = None
        host, port, *_ = listener.getsockname()
        self._url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    async def run(self, make_app: Callable[..., ASGIApp], **limits: int) -> None:
        """Serve until stopped. limits: the keyword arguments of ``Listener``. Raises StageFailed."""
        app = make_app(has_loaded=lambda: self._has_loaded)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._watch_stages)
            listener = Listener(self._listener, app, self._system.metrics.registry, **limits)
            self._announce(f"listening on {self._url}; {self._system.pipeline.name!r} is loading")
            await listener.run(self._stop, self._drain_s, lambda: self._system.abort_all("the server is shutting down"))
            nursery.cancel_scope.cancel()
        if self._failure is not None:
            raise self._failure

    async def _watch_stages(self) -> None:
        """Announce when all stages have loaded, and log each death."""
        exits: dict[tuple[str, int], str | None] = {}
        while True:
            health = self._system.health()
            if self._system.dead_error is not None and (self._exit_on_failed_stage or not self._has_loaded):
                self._failure = self._system.dead_error
                self._stop.set()
                return
            if not self._has_loaded and health.ready:
                self._has_loaded = True
                gc.freeze()  # a full garbage collection would visit every imported object, which delays all requests
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
    """Open a listening socket for the block. Raises CannotListen."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, _, _, address = found[0]
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
            # If another server has bound the address and does not listen yet, only this call fails.
            listener.listen(BACKLOG)
        except OSError as error:
            raise CannotListen(host, port, os.strerror(error.errno or 0)) from error
        yield listener


def _warn_if_public(listener: socket.socket) -> None:
    """Warn if other machines can reach a server without a key."""
    host, port, *_ = listener.getsockname()
    if not ip_address(host).is_loopback:
        message = "no API key: every machine that can reach %s port %d can use this server; set --api-key or %s"
        log.warning(message, host, port, defaults.API_KEY_VARIABLE)
