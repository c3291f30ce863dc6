"""The routes, and what becomes of an error that reaches them."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection

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
from omni_actors.serve.api.errors import to_http_error
from omni_actors.serve.http.errors import HTTPError
from omni_actors.serve.media.loader import MediaLoader
from omni_actors.serve.routes.chat import chat
from omni_actors.serve.routes.speech import speech
from omni_actors.serve.routes.status import health, metrics, model, models
from omni_actors.serve.routes.transcription import transcription
from omni_actors.system import OmniSystem

LOADING_RETRY_S = 1
HELD_BODIES = 4
"""What requests have brought so far that still arrive may together be so many times as large as one may be."""

WORK = {
    "/v1/chat/completions": chat,
    "/v1/audio/speech": speech,
    "/v1/audio/transcriptions": transcription,
}
"""What needs the pipeline's stages."""


def build(
    system: OmniSystem,
    *,
    api_key: str | None,
    max_body_bytes: int,
    media: MediaLoader,
    has_loaded: Callable[[], bool],
    origins: Collection[str] = (),
    hosts: Collection[str] = (),
) -> ASGIApp:
    """The whole ASGI app. has_loaded: whether all stages have been ready once; until then there is no work.

    origins, hosts: see ``OriginCheck``.
    """

    max_requests = system.pipeline.limits.max_requests
    admission = AdmissionControl(
        lambda: system.in_flight,
        lambda: system.retry_after_s,
        max_requests=max_requests,
        max_bytes=HELD_BODIES * max_body_bytes,
        max_request_bytes=max_body_bytes,
        free_place=system.make_room,
    )
    arriving = Gauge("omni_http_arriving", "Requests that are read or decoded", registry=system.metrics.registry)
    arriving.set_function(lambda: len(admission))

    def admit(path: str) -> AdmissionTicket | None:
        if path not in WORK:
            return None
        if not has_loaded():
            message = "the model is loading; see /health"
            raise HTTPError(503, message, type="server_error", code="loading", retry_after_s=LOADING_RETRY_S)
        return admission.admit()

    readable = {"/health": health, "/metrics": metrics, "/v1/models": models}
    routes = [Route(path, handler, methods=["POST"]) for path, handler in WORK.items()]
    routes += [Route(path, handler, methods=["GET"]) for path, handler in readable.items()]
    routes += [Route("/v1/models/{model}", model, methods=["GET"])]
    app = Starlette(
        routes=routes,
        exception_handlers={
            HTTPError: lambda _, error: error.response(),
            RequestError: lambda _, error: to_http_error(error).response(),
            HTTPException: _routing_error,
            Exception: lambda *_: HTTPError(
                500, "internal error", type="server_error", code="internal_error"
            ).response(),
        },
    )
    app.router.redirect_slashes = False
    app.state.system, app.state.media = system, media
    app.state.created, app.state.api_key = int(time.time()), api_key
    door = RequestGate(
        app,
        system.metrics.registry,
        api_key=api_key,
        max_body_bytes=max_body_bytes,
        public={"/health"},
        routes={*WORK, *readable},
        admit=admit,
    )
    return OriginCheck(door, origins=origins, hosts=hosts, has_key=api_key is not None)


def _routing_error(request: Request, error: Exception) -> Response:
    """What Starlette finds wrong: no such path, or not with this method."""
    assert isinstance(error, HTTPException)
    code = {404: "unknown_url", 405: "method_not_allowed"}.get(error.status_code, "invalid_request")
    place = f" ({request.method} {request.scope['path']})" if error.status_code in (404, 405) else ""
    return HTTPError(error.status_code, f"{error.detail}{place}", code=code, headers=error.headers).response()
