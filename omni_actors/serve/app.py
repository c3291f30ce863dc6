"""The table of routes, and the ASGI application around them."""

from __future__ import annotations

import inspect
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping
from typing import NamedTuple

import msgspec
from prometheus_client import Gauge
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, WebSocketRoute
from starlette.types import ASGIApp

from omni_actors.errors import CallError, OmniError, RequestError, StageFailed, SystemClosed
from omni_actors.serve.access.admission import AdmissionControl, AdmissionTicket
from omni_actors.serve.access.gate import RequestGate
from omni_actors.serve.access.origins import OriginCheck
from omni_actors.serve.access.request_log import RequestLog
from omni_actors.serve.api import audio_schemas, image_schemas, response_schemas, schemas
from omni_actors.serve.api.errors import to_http_error
from omni_actors.serve.api.openapi import EVENTS, JSON, Form, Operation, document
from omni_actors.serve.api.responses import JSONResponse
from omni_actors.serve.http.errors import HTTPError, forget_frames, internal_error
from omni_actors.serve.media.loader import MediaLoader
from omni_actors.serve.page import chaos, files
from omni_actors.serve.pipelines import Pipelines
from omni_actors.serve.response_store import ResponseStore
from omni_actors.serve.routes import (
    admin,
    chat,
    completions,
    embeddings,
    images,
    live_state,
    realtime,
    response_routes,
    speech,
    status,
    tokens,
    transcription,
)
from omni_actors.serve.settings import ServerSettings
from omni_actors.serve.state_feed import StateFeed
from omni_actors.serve.tracing import TraceContext
from omni_actors.system import OmniSystem

BODY_BUDGET_FACTOR = 4
"""The bytes of all arriving requests are limited to this many times ``max_body_bytes``."""


_Handler = Callable[[Request], Awaitable[Response]]


async def _openapi(request: Request) -> Response:
    """Return this document."""
    return JSONResponse(request.app.state.openapi)


class _Route(NamedTuple):
    """handler: its docstring describes the route. The rest is as ``openapi.Operation`` has it."""

    handler: _Handler
    body: type[msgspec.Struct] | None = None
    answers: tuple[str, ...] = (JSON,)
    form: Form | None = None


_TRANSCRIPTS = (JSON, "text/plain", "text/vtt")

MODEL_ROUTES: dict[str, _Route] = {
    "/v1/chat/completions": _Route(chat.chat, schemas.ChatRequest, (JSON, EVENTS)),
    "/v1/completions": _Route(completions.completions, schemas.CompletionRequest, (JSON, EVENTS)),
    "/v1/embeddings": _Route(embeddings.embeddings, schemas.EmbeddingRequest),
    "/v1/audio/speech": _Route(speech.speech, audio_schemas.SpeechRequest, (*speech.MEDIA_TYPES.values(), EVENTS)),
    "/v1/audio/transcriptions": _Route(
        transcription.transcription,
        answers=(*_TRANSCRIPTS, EVENTS),
        form=Form(audio_schemas.TranscriptionRequest, transcription.FILE),
    ),
    "/v1/audio/translations": _Route(
        transcription.translation,
        answers=_TRANSCRIPTS,
        form=Form(audio_schemas.TranslationRequest, transcription.FILE),
    ),
    "/v1/images/edits": _Route(
        images.edit,
        image_schemas.ImageEditRequest,
        (JSON, EVENTS),
        Form(image_schemas.ImageEditForm, images.FILES),
    ),
    "/v1/images/generations": _Route(images.generate, image_schemas.ImageRequest, (JSON, EVENTS)),
    "/v1/responses": _Route(response_routes.create, response_schemas.ResponsesRequest, (JSON, EVENTS)),
}
"""The routes that make requests. They accept POST."""
RESPONSE_ROUTES: tuple[tuple[str, str, _Handler], ...] = (
    ("get", "/v1/responses/{response_id}", response_routes.retrieve),
    ("delete", "/v1/responses/{response_id}", response_routes.delete),
    ("post", "/v1/responses/{response_id}/cancel", response_routes.cancel),
)
"""The routes of one response: method, path, handler. They read no body."""
CALL_ROUTES: dict[str, _Route] = {
    "/detokenize": _Route(tokens.detokenize, schemas.DetokenizeRequest),
    "/tokenize": _Route(tokens.tokenize, schemas.TokenizeRequest),
}
"""The routes that call engines beside requests. They accept POST."""
STATUS_ROUTES: dict[str, tuple[_Handler, tuple[str, ...]]] = {
    "/health": (status.health, (JSON,)),
    "/metrics": (status.metrics, ("text/plain",)),
    "/openapi.json": (_openapi, (JSON,)),
    "/ping": (status.ping, ()),
    "/v1/models": (status.models, (JSON,)),
    "/v1/models/{model}": (status.model, (JSON,)),
    "/v1/state": (live_state.live_state, (JSON, EVENTS)),
    "/version": (status.version, (JSON,)),
}
"""The routes that describe the server, with the content types of their answers. They accept GET."""
PUBLIC = {"/health", "/ping"}
"""The routes that need no key."""


def admission_to(pipelines: Pipelines, settings: ServerSettings) -> AdmissionControl:
    """Return the admission control of all requests to the pipelines."""
    max_bytes = BODY_BUDGET_FACTOR * settings.max_body_bytes
    return AdmissionControl(*pipelines.systems, max_bytes=max_bytes, max_request_bytes=settings.max_body_bytes)


def build(
    pipelines: Pipelines,
    settings: ServerSettings,
    *,
    admission: AdmissionControl,
    media: MediaLoader,
    is_draining: Callable[[], bool] = lambda: False,
) -> ASGIApp:
    """Return the complete ASGI application.

    Args:
        pipelines: the running pipelines.
        settings: which requests to refuse.
        admission: admits requests.
        media: loads the files of requests.
        is_draining: whether the server has begun to drain.
    """
    arriving = Gauge("omni_http_arriving", "Requests that are being read or decoded", registry=pipelines.registry)
    arriving.set_function(lambda: len(admission.tickets))

    operations = admin.OPERATIONS if settings.enable_admin else {}
    calls = {*CALL_ROUTES, *operations}

    def admit(path: str) -> AdmissionTicket | None:
        if path not in MODEL_ROUTES and path not in calls and path != realtime.PATH:
            return None
        pipelines.require_any_loaded()
        if path == realtime.PATH:
            return None
        return admission.admit(needs_place=path in MODEL_ROUTES)

    sessions = realtime.Realtime(pipelines, settings)
    gauge = Gauge("omni_realtime_sessions", "Sessions of the realtime API", registry=pipelines.registry)
    gauge.set_function(lambda: sessions.count)
    pages = files.routes() if settings.has_page else []
    facts = [files.facts_route(settings)] if settings.has_page else []
    faults = chaos.routes() if settings.chaos else []
    app = _starlette(operations, sessions, [*pages, *facts, *faults])
    app.state.openapi = document(
        _described(operations), has_key=settings.api_key is not None, needs_model=pipelines.are_several
    )
    app.state.pipelines, app.state.system = pipelines, pipelines.first
    app.state.media, app.state.is_draining = media, is_draining
    app.state.state_feeds = {
        name: StateFeed(system.live_state, is_draining) for name, system in pipelines.by_name.items()
    }
    app.state.responses = ResponseStore()
    app.state.created, app.state.api_key = int(time.time()), settings.api_key
    gate = RequestGate(
        app,
        pipelines.registry,
        api_key=settings.api_key,
        max_body_bytes=settings.max_body_bytes,
        public=PUBLIC | {route.path for route in pages},
        routes={*MODEL_ROUTES, *STATUS_ROUTES, *calls, realtime.PATH},
        websockets={realtime.PATH},
        admit=admit,
    )
    traced: ASGIApp = TraceContext(gate) if pipelines.first.is_tracing_enabled else gate
    has_key = settings.api_key is not None
    checked = OriginCheck(
        traced,
        origins=settings.allow_origins,
        hosts=settings.allow_hosts,
        has_key=has_key,
        allows_credentials=settings.allow_credentials,
    )
    return RequestLog(checked, writes_lines=settings.access_log)


def _described(operations: Mapping[str, admin.Operation]) -> list[tuple[str, Operation]]:
    """Return the path and the description of each operation, for the OpenAPI document."""
    described = [
        (path, Operation("post", route.body, summary_of(route.handler), form=route.form, answers=route.answers))
        for path, route in (MODEL_ROUTES | CALL_ROUTES).items()
    ]
    described += [(path, Operation(method, None, summary_of(handler))) for method, path, handler in RESPONSE_ROUTES]
    for path, (handler, answers) in STATUS_ROUTES.items():
        summary = summary_of(handler)
        described.append((path, Operation("get", None, summary, answers=answers, is_public=path in PUBLIC)))
    for path, each in operations.items():
        summary = summary_of(getattr(OmniSystem, each.method))
        described.append((path, Operation(each.http_method.lower(), each.schema, summary)))
    return described


def _starlette(operations: Mapping[str, admin.Operation], sessions: realtime.Realtime, more: list[Route]) -> Starlette:
    """Return the application without its gate: the routes, and the response to each kind of exception.

    more: routes that are not a part of the API.
    """
    routes = [*more]
    routes += [Route(path, route.handler, methods=["POST"]) for path, route in (MODEL_ROUTES | CALL_ROUTES).items()]
    by_path = defaultdict[str, dict[str, _Handler]](dict)
    for method, path, handler in RESPONSE_ROUTES:
        by_path[path][method.upper()] = handler
    routes += [Route(path, _by_method(handlers), methods=[*handlers]) for path, handlers in by_path.items()]
    for path, (handler, _) in STATUS_ROUTES.items():
        # A model's name may have a slash.
        routes.append(Route(path.replace("{model}", "{model:path}"), handler, methods=["GET"]))
    for path, each in operations.items():
        routes.append(Route(path, admin.handler(each), methods=[each.http_method]))
    upgrade = Route(realtime.PATH, realtime.upgrade_required, methods=["GET"])
    app = Starlette(
        routes=[*routes, upgrade, WebSocketRoute(realtime.PATH, sessions.serve)],
        exception_handlers={
            HTTPError: _refusal,
            RequestError: _refusal,
            CallError: _refusal,
            StageFailed: _refusal,
            SystemClosed: _refusal,
            HTTPException: _routing_error,
            Exception: _internal_error,
        },
    )
    app.router.redirect_slashes = False
    return app


def _by_method(handlers: Mapping[str, _Handler]) -> _Handler:
    """Return a handler of all methods of a path. One route has them all, so that a refusal names them all."""

    async def handle(request: Request) -> Response:
        return await handlers["GET" if request.method == "HEAD" else request.method](request)

    return handle


def summary_of(function: Callable[..., object]) -> str:
    """Return the first sentence of a function's documentation."""
    return (inspect.getdoc(function) or "").partition("\n\n")[0].replace("\n", " ")


# Handlers of exceptions are asynchronous: Starlette runs others in threads, for which a refusal would have to wait.


async def _refusal(request: Request, error: Exception) -> Response:
    """Return the response to an error that a handler has raised."""
    forget_frames(error)
    if isinstance(error, HTTPError):
        return error.response()
    assert isinstance(error, OmniError)
    return to_http_error(error).response()


async def _internal_error(request: Request, error: Exception) -> Response:
    return internal_error().response()


async def _routing_error(request: Request, error: Exception) -> Response:
    """Return the response to an unknown path, or to a method that a path does not have."""
    assert isinstance(error, HTTPException)
    code = {404: "unknown_url", 405: "method_not_allowed"}.get(error.status_code, "invalid_request")
    where = f" ({request.method} {request.scope['path']})" if error.status_code in (404, 405) else ""
    return HTTPError(error.status_code, f"{error.detail}{where}", code=code, headers=error.headers).response()
