"""The server's tracer provider: where its traces go.

Rules
1. The operator turns tracing on by ``--otlp-endpoint`` or by OpenTelemetry's own variables for an endpoint, and sets
   everything else (sampling, headers, batches, the service's name) by the other OTEL_* variables.
2. Traces never delay or fail a request: a thread of the SDK sends them in batches, and drops what a collector does not
   take. The end of the server waits for the last batch for ``FLUSH_S`` at most.
"""

from __future__ import annotations

import logging
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import trio
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from omni_actors.errors import ConfigError
from omni_actors.log_events import REQUEST_ID

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

ENDPOINT_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
SERVICE_NAME = "omni_actors"
"""The name of the service, unless OTEL_SERVICE_NAME or OTEL_RESOURCE_ATTRIBUTES has one."""
FLUSH_S = 3.0

log = logging.getLogger("omni_actors.serve")


class TraceContext:
    """An ASGI application around another one: what that does for a client continues the client's trace."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        from opentelemetry.context import attach, detach, set_value

        from omni_actors.system.tracing import CONTEXT_HEADERS, HTTP_REQUEST_ID, remote_context

        found = Headers(scope=scope)  # a header that was sent twice is joined, as HTTP has it
        headers = {name: ",".join(found.getlist(name)) for name in CONTEXT_HEADERS if name in found}
        token = attach(set_value(HTTP_REQUEST_ID, REQUEST_ID.get(), remote_context(headers)))
        try:
            await self._app(scope, receive, send)
        finally:
            detach(token)


@asynccontextmanager
async def open_provider(endpoint: str | None) -> AsyncIterator[TracerProvider | None]:
    """Yield a provider that sends traces to a collector, or None if no endpoint is known.

    Args:
        endpoint: the URL of an OTLP/HTTP collector, such as "http://localhost:4318"; None: that of the environment.

    Raises ConfigError: the libraries of the extra "tracing" are missing.
    """
    provider = make_provider(endpoint)
    try:
        yield provider
    finally:
        if provider is not None:
            with trio.move_on_after(FLUSH_S, shield=True):
                await trio.to_thread.run_sync(provider.shutdown, abandon_on_cancel=True)


def make_provider(endpoint: str | None) -> TracerProvider | None:
    """Return the provider of ``open_provider``. Raises as that does."""
    given = {"--otlp-endpoint": endpoint, **{name: os.environ.get(name) for name in ENDPOINT_VARIABLES}}
    origin = next((name for name, url in given.items() if url), None)
    if origin is None:
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        accepted = f"an endpoint, with the extra installed (pip install '.[tracing]' in the clone): {error}"
        raise ConfigError(origin, "tracing", given[origin], accepted) from error
    # A client could fill the log with malformed contexts, which the SDK reports at this level.
    logging.getLogger("opentelemetry.trace").setLevel(logging.ERROR)
    named: dict[str, Any] = dict(OTELResourceDetector().detect().attributes)
    resource = Resource.create({"service.name": SERVICE_NAME, **named})
    exporter = OTLPSpanExporter(None if endpoint is None else f"{endpoint.rstrip('/')}/v1/traces")
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)  # ``open_provider`` does, in bounded time
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return provider
