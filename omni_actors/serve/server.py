"""The life cycle of the server: listen, load, serve, drain, end.

Rules
1. A bad configuration (ConfigError) or address (CannotListen) is reported before anything starts.
2. The socket listens while the stages load. Until all have loaded, requests for the pipeline are refused, and /health
   shows the progress. A stage that cannot load ends the server with StageFailed. A stage that fails later does so only
   with ``exit_on_failed_stage``. Otherwise requests that do not need the stage are served, and it is tried again. A
   server whose socket is lost drains, and ends with CannotListen. What fails after a signal changes nothing.
3. The first SIGINT or SIGTERM starts the drain. For ``drain_notice_s``, /health and /ping report it with 503, so that
   load balancers send no more requests, and new requests are still served. Then there are no new connections, requests
   in progress have ``drain_s``, and at last every request ends with an error (``http.listener``). The second signal
   kills the process, and the kernel then kills the workers. A signal within ``DUPLICATE_SIGNAL_S`` of the first is the
   same one: process managers that signal a process and its group send two.
4. With several pipelines, one that cannot load does not end the others: it is logged (``pipeline_failed``), /health
   shows it, and its stages are tried again. The server ends when none can load.
5. With TLS, SIGHUP loads the certificate again, for new connections.
6. Clients cannot use up the process's descriptors: the server reserves enough to restart every worker
   that the pipelines' files allow (``http.descriptors``). Replicas that ``scale`` adds beyond that have no reserve.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import trio

from omni_actors import config as configuration
from omni_actors.config import Pipeline
from omni_actors.errors import OmniError
from omni_actors.log_events import LogEvent, PipelineFailed, ServerDraining, ServerListening, ServerReady, record
from omni_actors.platform.allocator import keep_freed_memory
from omni_actors.serve.app import admission_to, build
from omni_actors.serve.certificates import Certificates
from omni_actors.serve.http.buffered_socket import SEND_TIMEOUT_S
from omni_actors.serve.http.descriptors import DescriptorBudget
from omni_actors.serve.http.listener import HTTPListener, SocketLost
from omni_actors.serve.media.loader import MediaLoader
from omni_actors.serve.pipelines import Pipelines
from omni_actors.serve.settings import API_KEY_VARIABLE, DEFAULTS, ServerSettings
from omni_actors.serve.tracing import open_provider
from omni_actors.system import OmniSystem
from omni_actors.system.garbage import make_full_collections_rare

DUPLICATE_SIGNAL_S = 0.25
SEND_BUFFER_BYTES = 128 * 1024
"""The kernel doubles it. This much of a response can wait for a client without being counted in any limit."""
BACKLOG = 1024
MOVED_BYTES = 8 * 1024**2
"""A body of this size or more grows without being copied: a copy of 32 MB would hold the event loop for 30 to 80 ms."""

log = logging.getLogger("omni_actors.serve")


class CannotListen(OmniError):
    """The server cannot listen on its address, or cannot any more."""

    def __init__(self, host: str, port: int, reason: str) -> None:
        self.host, self.port = host, port
        super().__init__(f"cannot listen on {host}:{port}: {reason}")


async def serve(
    config: str | Path | Pipeline | Sequence[Pipeline] = "voice",
    settings: ServerSettings = DEFAULTS,
    *,
    overrides: Mapping[str, Any] | None = None,
    media: MediaLoader | None = None,
    announce: Callable[[str], None] | None = print,
    handles_signals: bool = True,
    task_status: trio.TaskStatus[str] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve one or several pipelines until SIGINT or SIGTERM. Every worker has ended when this returns.

    Args:
        config: a pipeline, or its name or path; or several pipelines, whose names differ.
        settings: how the server listens, which requests it refuses, and when it ends.
        overrides: values that replace those of ``config``, by their path. Only for a single pipeline; others are loaded
            with theirs before (``omni_actors.config.load``).
        media: loads files at URLs. None: only files in the body are allowed.
        announce: called with one line when the server listens, and with one when it is ready. None: they are logged.
        handles_signals: whether SIGINT and SIGTERM stop the server; if not, only cancellation does.
        task_status: for ``nursery.start``, which returns the server's URL when every pipeline has loaded, or cannot
            while others have (rule 4).

    Raises ConfigError, CannotListen (also if the socket is lost), StageFailed (a stage that cannot load, or see
    ``exit_on_failed_stage``), StartTimedOut, ValueError (``overrides`` with several pipelines).
    Cancellation ends all requests at once, and stops the workers.
    """
    if isinstance(config, str | Path | Pipeline):
        config = [configuration.load(config, overrides)]
    elif overrides:
        raise ValueError("overrides are for a single pipeline; give each its own: omni_actors.config.load(name, {...})")
    certificates = None if settings.ssl_certfile is None else Certificates(settings)
    descriptors = DescriptorBudget.of_this_process()
    failure: OmniError | None = None
    async with trio.open_nursery() as nursery:
        stop: trio.Event = await nursery.start(_watch_signals) if handles_signals else trio.Event()
        if certificates is not None and handles_signals:
            await nursery.start(_reload_on_hangup, certificates)
        try:
            with _listening_socket(settings.host, settings.port) as sock:
                if settings.api_key is None:
                    warn_if_public(sock)
                async with AsyncExitStack() as stack:
                    tracer_provider = await stack.enter_async_context(open_provider(settings.otlp_endpoint))
                    systems = [
                        await stack.enter_async_context(
                            OmniSystem.open(
                                pipeline, wait_ready=False, cluster=settings.cluster, tracer_provider=tracer_provider
                            )
                        )
                        for pipeline in config
                    ]
                    server = _Server(
                        Pipelines(systems),
                        settings,
                        certificates=certificates,
                        signalled=stop,
                        announce=announce,
                        task_status=task_status,
                    )
                    reserved = sum(system.descriptors for system in systems)
                    most = descriptors.max_connections(settings.max_connections, reserved=reserved)
                    await server.run(sock, media or MediaLoader(), max_connections=most)
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


async def _reload_on_hangup(certificates: Certificates, task_status: trio.TaskStatus[None]) -> None:
    """Load the certificate again at each SIGHUP."""
    with trio.open_signal_receiver(signal.SIGHUP) as signals:
        task_status.started()
        async for _ in signals:
            certificates.reload()


class _Server:
    """A listening server with its running pipelines."""

    def __init__(
        self,
        pipelines: Pipelines,
        settings: ServerSettings,
        *,
        certificates: Certificates | None,
        signalled: trio.Event,
        announce: Callable[[str], None] | None,
        task_status: trio.TaskStatus[str],
    ) -> None:
        self._pipelines, self._settings, self._signalled, self._announce = pipelines, settings, signalled, announce
        self._certificates, self._task_status = certificates, task_status
        self._admission = admission_to(pipelines, settings)
        self._stop = trio.Event()
        """Set when the server accepts no more connections."""
        self._failed: set[str] = set()
        """The pipelines that could not load."""
        self._has_started = False
        """Whether ``task_status`` knows that the server serves."""
        self._failure: OmniError | None = None
        """Why the server cannot serve any more."""

    async def run(self, sock: socket.socket, media: MediaLoader, *, max_connections: int) -> None:
        """Serve on a listening socket until stopped. Raises CannotListen, StageFailed, StartTimedOut."""
        host, port, *_ = sock.getsockname()
        scheme = "http" if self._certificates is None else "https"
        url = f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
        async with trio.open_nursery() as nursery:
            for system in self._pipelines.systems:
                nursery.start_soon(self._watch_stages, system, url)
            nursery.start_soon(self._stop_after_notice)
            listener = HTTPListener(
                sock,
                build(
                    self._pipelines,
                    self._settings,
                    admission=self._admission,
                    media=media,
                    is_draining=lambda: self._signalled.is_set() or self._stop.is_set(),
                ),
                self._pipelines.registry,
                max_connections=max_connections,
                max_per_address=self._settings.max_connections_per_address,
                max_body_bytes=self._settings.max_body_bytes,
                max_message_bytes=self._settings.max_event_bytes,
                tls=lambda: None if self._certificates is None else self._certificates.context,
            )
            page = f"{url}/" if self._settings.has_page else None
            self._report(ServerListening(url=url, pipeline=", ".join(self._pipelines.by_name), page=page))
            try:
                await listener.run(self._stop, self._settings.drain_s, self._end_requests)
            except SocketLost as error:
                self._failure = CannotListen(host, port, f"its socket was lost: {error}")
            nursery.cancel_scope.cancel()
        if self._failure is not None:
            raise self._failure

    async def _stop_after_notice(self) -> None:
        """Stop ``drain_notice_s`` after a signal."""
        await self._signalled.wait()
        if notice_s := self._settings.drain_notice_s:
            record(ServerDraining(notice_s=notice_s))
            await trio.sleep(notice_s)
        self._stop.set()

    def _end_requests(self) -> None:
        for system in self._pipelines.systems:
            system.abort_all("the server is shutting down")
        self._admission.end_all()

    async def _watch_stages(self, system: OmniSystem, url: str) -> None:
        """Announce when all stages of a pipeline have loaded, and stop the server if it cannot serve."""
        name, loaded = system.pipeline.name, self._pipelines.loaded
        while not (self._stop.is_set() or self._signalled.is_set()):
            failed, late = system.dead_error, system.start_error
            fatal = failed if self._settings.exit_on_failed_stage or name not in loaded else None
            if fatal or (late and name not in loaded):
                self._pipeline_failed(name, fatal or late)
            if name not in loaded and system.health().ready:
                loaded.add(name)
                self._failed.discard(name)
                make_full_collections_rare()
                keep_freed_memory(below=MOVED_BYTES)
                self._report(ServerReady(url=url, pipeline=name))
            self._start_if_settled(url)
            if not self._stop.is_set():
                await system.wait_changed()

    def _start_if_settled(self, url: str) -> None:
        """Let ``nursery.start`` return once some pipeline has loaded, and each other one too or it cannot load."""
        loaded = self._pipelines.loaded
        if loaded and loaded | self._failed == self._pipelines.by_name.keys() and not self._has_started:
            self._has_started = True
            self._task_status.started(url)

    def _pipeline_failed(self, name: str, error: OmniError | None) -> None:
        """Stop the server, unless other pipelines can serve (rule 4)."""
        is_new = name not in self._failed
        self._failed.add(name)
        if self._settings.exit_on_failed_stage or self._failed == self._pipelines.by_name.keys():
            self._failure = error
            self._stop.set()
        elif is_new:
            record(PipelineFailed(pipeline=name, reason=str(error)))

    def _report(self, event: LogEvent) -> None:
        if self._announce is None:
            record(event)
        else:
            self._announce(str(event))


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


def warn_if_public(listener: socket.socket) -> None:
    """Warn if other machines can reach a server without a key."""
    host, port, *_ = listener.getsockname()
    if not ip_address(host).is_loopback:
        message = "no API key: every machine that can reach %s port %d can use this server; set --api-key or %s"
        log.warning(message, host, port, API_KEY_VARIABLE)
