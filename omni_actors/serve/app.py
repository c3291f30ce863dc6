"""The routes, and what becomes of an error that reaches them."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from typing import Any

import msgspec
from prometheus_client import Gauge
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from omni_actors.errors import RequestError
from omni_actors.serve.arrivals import Arrival, Arrivals
from omni_actors.serve.chat import chat
from omni_actors.serve.door import Door
from omni_actors.serve.keys import holds_key
from omni_actors.serve.media import Media
from omni_actors.serve.origins import OriginCheck
from omni_actors.serve.problems import Problem, as_problem
from omni_actors.serve.replies import Json
from omni_actors.serve.schemas import require_model
from omni_actors.serve.speech import speech
from omni_actors.serve.transcription import transcription
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
    media: Media,
    has_loaded: Callable[[], bool],
    origins: Collection[str] = (),
    hosts: Collection[str] = (),
) -> ASGIApp:
    """The whole ASGI app. has_loaded: whether all stages have been ready once; until then there is no work.

    origins, hosts: see ``OriginCheck``.
    """

    max_requests = system.pipeline.limits.max_requests
    arrivals = Arrivals(
        lambda: system.in_flight,
        lambda: system.retry_after_s,
        max_requests=max_requests,
        max_bytes=HELD_BODIES * max_body_bytes,
        max_request_bytes=max_body_bytes,
        free_place=system.make_room,
    )
    arriving = Gauge("omni_http_arriving", "Requests that are read or decoded", registry=system.metrics.registry)
    arriving.set_function(lambda: len(arrivals))

    def admit(path: str) -> Arrival | None:
        if path not in WORK:
            return None
        if not has_loaded():
            message = "the model is loading; see /health"
            raise Problem(503, message, type="server_error", code="loading", retry_after_s=LOADING_RETRY_S)
        return arrivals.admit()

    readable = {"/health": health, "/metrics": metrics, "/v1/models": models}
    routes = [Route(path, handler, methods=["POST"]) for path, handler in WORK.items()]
    routes += [Route(path, handler, methods=["GET"]) for path, handler in readable.items()]
    routes += [Route("/v1/models/{model}", model, methods=["GET"])]
    app = Starlette(
        routes=routes,
        exception_handlers={
            Problem: lambda _, error: error.response(),
            RequestError: lambda _, error: as_problem(error).response(),
            HTTPException: _http_problem,
            Exception: lambda *_: Problem(500, "internal error", type="server_error", code="internal_error").response(),
        },
    )
    app.router.redirect_slashes = False
    app.state.system, app.state.media = system, media
    app.state.created, app.state.api_key = int(time.time()), api_key
    door = Door(
        app,
        system.metrics.registry,
        api_key=api_key,
        max_body_bytes=max_body_bytes,
        public={"/health"},
        routes={*WORK, *readable},
        admit=admit,
    )
    return OriginCheck(door, origins=origins, hosts=hosts, has_key=api_key is not None)


def _http_problem(request: Request, error: Exception) -> Response:
    """What Starlette finds wrong: no such path, or not with this method."""
    assert isinstance(error, HTTPException)
    code = {404: "unknown_url", 405: "method_not_allowed"}.get(error.status_code, "invalid_request")
    place = f" ({request.method} {request.scope['path']})" if error.status_code in (404, 405) else ""
    return Problem(error.status_code, f"{error.detail}{place}", code=code, headers=error.headers).response()


async def health(request: Request) -> Response:
    """200 while every stage serves, else 503; the body says how each replica is.

    The path needs no key. A client that holds the key, or a server without one, gets everything but what the workers
    wrote. Other clients get the states alone: no processes, no reasons, no history.
    """
    system: OmniSystem = request.app.state.system
    now = system.health()
    states = [replica.state for stage in now.stages.values() for replica in stage]
    status = "ready" if now.ready else next((s for s in ("failed", "restarting", "loading") if s in states), "loading")
    body: dict[str, Any] = {"status": status, "model": system.pipeline.name}
    if holds_key(request.headers.raw, request.app.state.api_key):
        error = system.dead_error.reason if system.dead_error else None
        body |= {**msgspec.to_builtins(now), "error": error}
    else:
        stages = {name: [{"replica": r.replica, "state": r.state} for r in stage] for name, stage in now.stages.items()}
        body |= {"ready": now.ready, "errored": now.errored, "stages": stages}
    return Json(body, 200 if now.ready else 503)


async def metrics(request: Request) -> Response:
    """Prometheus's text format."""
    system: OmniSystem = request.app.state.system
    return Response(system.metrics.exposition(), media_type="text/plain; version=0.0.4; charset=utf-8")


async def models(request: Request) -> Response:
    return Json({"object": "list", "data": [_model(request)]})


async def model(request: Request) -> Response:
    system: OmniSystem = request.app.state.system
    require_model(request.path_params["model"], system.pipeline.name)
    return Json(_model(request))


def _model(request: Request) -> dict[str, object]:
    state = request.app.state
    return {"id": state.system.pipeline.name, "object": "model", "created": state.created, "owned_by": "omni_actors"}
