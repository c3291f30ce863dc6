"""The routes that describe the server: health, metrics, models, version and OpenAPI."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from omni_actors import __version__
from omni_actors.serve.access.gate import has_valid_key
from omni_actors.serve.api.responses import JSONResponse
from omni_actors.serve.api.schemas import require_model
from omni_actors.system import Health, OmniSystem


async def health(request: Request) -> Response:
    """Describe each replica. The status is 200 while every stage serves and the server does not drain, else 503.

    The path needs no key. A client with the key (any client, if there is no key) gets all facts except the workers'
    stderr. Other clients get the states only: no processes, no reasons, no history.
    """
    system: OmniSystem = request.app.state.system
    now = system.health()
    is_draining = request.app.state.is_draining()
    status = "draining" if is_draining else overall_status(now)
    body: dict[str, Any] = {"status": status, "model": system.pipeline.name}
    if has_valid_key(request.headers.raw, request.app.state.api_key):
        error = system.dead_error.reason if system.dead_error else None
        body |= {**msgspec.to_builtins(now), "error": error}
    else:
        stages = {name: [{"replica": r.replica, "state": r.state} for r in stage] for name, stage in now.stages.items()}
        body |= {"ready": now.ready, "errored": now.errored, "stages": stages}
    return JSONResponse(body, 200 if now.ready and not is_draining else 503)


def overall_status(now: Health) -> str:
    """Return "ready", or the state of the stage that is worst off. A stage is in the state of its best replica."""
    if now.ready:
        return "ready"
    best_first = ("ready", "draining", "loading", "restarting", "asleep", "failed")
    states = [min(best_first.index(replica.state) for replica in stage) for stage in now.stages.values() if stage]
    worst = best_first[max(states, default=0)]
    return "loading" if worst in ("ready", "draining") else worst


async def ping(request: Request) -> Response:
    """Return an empty response with the status of /health, for load balancers."""
    return Response(status_code=(await health(request)).status_code)


async def version(request: Request) -> Response:
    """Return the version of this package."""
    return JSONResponse({"version": __version__})


async def metrics(request: Request) -> Response:
    """Return the metrics in Prometheus's text format."""
    system: OmniSystem = request.app.state.system
    return Response(system.metrics.exposition(), media_type="text/plain; version=0.0.4; charset=utf-8")


async def models(request: Request) -> Response:
    """List the pipeline, which is a model, and its LoRA adapters."""
    return JSONResponse({"object": "list", "data": list(_models(request).values())})


async def model(request: Request) -> Response:
    """Describe a model. 404 for an unknown name."""
    known, asked = _models(request), request.path_params["model"]
    require_model(asked, list(known))
    return JSONResponse(known[asked])


def _models(request: Request) -> dict[str, dict[str, object]]:
    """Return the models that requests may name. An adapter has the pipeline as its parent, as in vLLM's server."""
    state = request.app.state
    base = state.system.pipeline.name
    common = {"object": "model", "created": state.created, "owned_by": "omni_actors"}
    adapters = {info.name: {"id": info.name, **common, "parent": base} for info in state.system.list_loras()}
    return {base: {"id": base, **common}, **adapters}
