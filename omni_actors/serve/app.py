"""The table of routes, and the ASGI application around them."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable

import msgspec
from prometheus_client import Gauge
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from omni_actors.errors import RequestError
from omni_actors.serve.access.admission import AdmissionControl, AdmissionTicket
from omni_actors.serve.access.gate import RequestGate
from omni_actors.serve.access.origins import OriginCheck
from omni_actors.serve.api import schemas
from omni_actors.serve.api.errors import to_http_error
from omni_actors.serve.api.openapi import document
from omni_actors.serve.api.responses import JSONResponse
from omni_actors.serve.http.errors import HTTPError, internal_error
from omni_actors.serve.media.loader import MediaLoader
from omni_actors.serve.routes import chat, completions, embeddings, speech, status, tokens, transcription
from omni_actors.serve.settings import ServerSettings
from omni_actors.serve.tracing import TraceContext
from omni_actors.system import OmniSystem

LOADING_RETRY_S = 1
BODY_BUDGET_FACTOR = 4
"""The bytes of all arriving requests are limited to this many times ``max_body_bytes``."""


_Handler = Callable[[Request], Awaitable[Response]]


async def _openapi(request: Request) -> Response:
    posts = {path: schema for path, (_, schema) in (MODEL_ROUTES | CALL_ROUTES).items()}
    return JSONResponse(document(posts, STATUS_ROUTES))


MODEL_ROUTES: dict[str, tuple[_Handler, type[msgspec.Struct]]] = {
    "/v1/chat/completions": (chat.chat, schemas.ChatRequest),
    "/v1/completions": (completions.completions, schemas.CompletionRequest),
    "/v1/embeddings": (embeddings.embeddings, schemas.EmbeddingRequest),
    "/v1/audio/speech": (speech.speech, schemas.SpeechRequest),
    "/v1/audio/transcriptions": (transcription.transcription, schemas.TranscriptionRequest),
}
"""The routes that make requests, and the schemas of their bodies. They accept POST."""
CALL_ROUTES: dict[str, tuple[_Handler, type[msgspec.Struct]]] = {
    "/detokenize": (tokens.detokenize, schemas.DetokenizeRequest),
    "/tokenize": (tokens.tokenize, schemas.TokenizeRequest),
}
"""The routes that call engines beside requests, and the schemas of their bodies. They accept POST."""
STATUS_ROUTES = {
    "/health": status.health,
    "/metrics": status.metrics,
    "/openapi.json": _openapi,
    "/ping": status.ping,
    "/v1/models": status.models,
    "/v1/models/{model}": status.model,
    "/version": status.version,
}
"""The routes that describe the server. They accept GET."""


def build(
    system: OmniSystem, settings: ServerSettings, *, media: MediaLoader, has_loaded: Callable[[], bool]
) -> ASGIApp:
    """Return the complete ASGI application.

    Args:
        system: the running pipeline.
        settings: which requests to refuse.
        media: loads the files of requests.
        has_loaded: whether all stages have been ready once. Until then, requests for the pipeline are refused.
    """
    max_bytes = BODY_BUDGET_FACTOR * settings.max_body_bytes
    admission = AdmissionControl(system, max_bytes=max_bytes, max_request_bytes=settings.max_body_bytes)
    arriving = Gauge("omni_http_arriving", "Requests that are being read or decoded", registry=system.metrics.registry)
    arriving.set_function(lambda: len(admission.tickets))

    def admit(path: str) -> AdmissionTicket | None:
        if path not in MODEL_ROUTES and path not in CALL_ROUTES:
            return None
        if not has_loaded():
            message = "the model is loading; see /health"
            raise HTTPError(503, message, code="loading", retry_after_s=LOADING_RETRY_S)
        return admission.admit(needs_place=path in MODEL_ROUTES)

    app = _starlette()
    app.state.system, app.state.media = system, media
    app.state.created, app.state.api_key = int(time.time()), settings.api_key
    gate = RequestGate(
        app,
        system.metrics.registry,
        api_key=settings.api_key,
        max_body_bytes=settings.max_body_bytes,
        public={"/health", "/ping"},
        routes={*MODEL_ROUTES, *CALL_ROUTES, *STATUS_ROUTES},
        admit=admit,
    )
    traced: ASGIApp = TraceContext(gate) if system.is_tracing_enabled else gate
    has_key = settings.api_key is not None
    return OriginCheck(traced, origins=settings.allow_origins, hosts=settings.allow_hosts, has_key=has_key)


def _starlette() -> Starlette:
    """Return the application without its gate: the routes, and the response to each kind of exception."""
    routes = [Route(path, handler, methods=["POST"]) for path, (handler, _) in (MODEL_ROUTES | CALL_ROUTES).items()]
    for path, handler in STATUS_ROUTES.items():
        # A model's name may have a slash.
        routes.append(Route(path.replace("{model}", "{model:path}"), handler, methods=["GET"]))
    app = Starlette(
        routes=routes,
        exception_handlers={
            HTTPError: lambda _, error: error.response(),
            RequestError: lambda _, error: to_http_error(error).response(),
            HTTPException: _routing_error,
            Exception: lambda *_: internal_error().response(),
        },
    )
    app.router.redirect_slashes = False
    return app


def _routing_error(request: Request, error: Exception) -> Response:
    """Return the response to an unknown path, or to a method that a path does not have."""
    assert isinstance(error, HTTPException)
    code = {404: "unknown_url", 405: "method_not_allowed"}.get(error.status_code, "invalid_request")
    where = f" ({request.method} {request.scope['path']})" if error.status_code in (404, 405) else ""
    return HTTPError(error.status_code, f"{error.detail}{where}", code=code, headers=error.headers).response()
