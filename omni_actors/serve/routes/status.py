"""The routes that describe the server: health, metrics, models, version and OpenAPI."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from omni_actors import __version__
from omni_actors.config import Pipeline
from omni_actors.serve.access.gate import has_valid_key
from omni_actors.serve.api.responses import JSONResponse
from omni_actors.serve.api.schemas import require_model
from omni_actors.serve.pipelines import Pipelines
from omni_actors.system import Health, OmniSystem


async def health(request: Request) -> Response:
    """Describe each replica. The status is 200 while every stage serves and the server does not drain, else 503.

    The path needs no key. A client with the key (any client, if there is no key) gets all facts except the workers'
    stderr. Other clients get the states only: no processes, no reasons, no history.

    Of several pipelines, ``?pipeline=NAME`` describes one. Without it, the status is 200 while any of them serves.
    """
    pipelines: Pipelines = request.app.state.pipelines
    if pipelines.are_several and "pipeline" not in request.query_params:
        described = {name: _description(request, system) for name, system in pipelines.by_name.items()}
        return _answer(request, {"status": _common_status(described), "pipelines": described})
    system = pipelines.named(request.query_params.get("pipeline"))
    return _answer(request, _description(request, system))


def _answer(request: Request, body: dict[str, Any]) -> Response:
    if request.app.state.is_draining():
        body["status"] = "draining"
    return JSONResponse(body, 200 if body["status"] in ("ready", "degraded") else 503)


def _description(request: Request, system: OmniSystem) -> dict[str, Any]:
    """Return the state of one pipeline, with the facts that the client may know."""
    now = system.health()
    body: dict[str, Any] = {"status": overall_status(now), "model": system.pipeline.name}
    if has_valid_key(request.headers.raw, request.app.state.api_key):
        error = system.dead_error.reason if system.dead_error else None
        return body | {**msgspec.to_builtins(now), "error": error}
    stages = {name: [{"replica": r.replica, "state": r.state} for r in stage] for name, stage in now.stages.items()}
    return body | {"ready": now.ready, "errored": now.errored, "stages": stages}


def _common_status(described: Mapping[str, Mapping[str, Any]]) -> str:
    """Return "ready", "degraded" if some pipelines serve, or the status of the first pipeline."""
    statuses = [each["status"] for each in described.values()]
    if "ready" not in statuses:
        return str(statuses[0])
    return "ready" if set(statuses) == {"ready"} else "degraded"


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
    pipelines: Pipelines = request.app.state.pipelines
    return Response(pipelines.exposition(), media_type="text/plain; version=0.0.4; charset=utf-8")


async def models(request: Request) -> Response:
    """List the pipelines, each of which is a model, and their LoRA adapters."""
    return JSONResponse({"object": "list", "data": list(_models(request).values())})


async def model(request: Request) -> Response:
    """Describe a model. 404 for an unknown name."""
    known, asked = _models(request), request.path_params["model"]
    require_model(asked, list(known))
    return JSONResponse(known[asked])


def _models(request: Request) -> dict[str, dict[str, object]]:
    """Return the models that requests may name. An adapter has the pipeline as its parent, as in vLLM's server."""
    state = request.app.state
    pipelines: Pipelines = state.pipelines
    common = {"object": "model", "created": state.created, "owned_by": "omni_actors"}
    found: dict[str, dict[str, object]] = {}
    for name, system in pipelines.by_name.items():
        found[name] = {"id": name, **common, "max_model_len": _context(system.pipeline)}
    for base, system in pipelines.by_name.items():
        for info in system.list_loras():
            found.setdefault(info.name, {"id": info.name, **common, "parent": base})
    return found


def _context(pipeline: Pipeline) -> int | None:
    """Return the most tokens of a prompt and its answer, if the options of the stage that reads prompts say it.

    vLLM takes it from the model if ``engine_args`` does not have it as a number.
    """
    for name, stage in pipeline.stages.items():
        schema = pipeline.spec(name).options
        if "messages" in stage.accepts and schema is not None:
            options = msgspec.convert(stage.options, schema)
            found = getattr(options, "context", getattr(options, "engine_args", {}).get("max_model_len"))
            if type(found) is int and found > 0:
                return found
    return None
