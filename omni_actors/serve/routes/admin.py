"""The control calls of an operator, under vLLM's paths where vLLM has them. They need ``--enable-admin``.

Rules
1. Each route is one method of ``OmniSystem``. The fields of its body, or of the query, are the method's arguments.
   ``pipeline`` names the pipeline, and is needed if the server has several.
2. A call answers for every replica of every stage that it concerns. If one failed, its error is the response. Stages
   without a capability fail the call (501) if fewer stages have it than ``Operation.needed`` demands; otherwise the
   response names them. It also names replicas without a worker if the call needs none: it has its effect without them.
3. No route writes where a client chooses. The file that a method writes is temporary, and it is the response.
"""

from __future__ import annotations

import functools
import inspect
import tempfile
from collections.abc import Awaitable, Callable, Mapping
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
import msgspec.inspect
import trio
from msgspec import Meta, field
from starlette.requests import Request
from starlette.responses import Response

from omni_actors.errors import InvalidRequest, OmniError, Unsupported, WorkerLost
from omni_actors.serve.api.errors import renaming, to_http_error, unsupported_as_501
from omni_actors.serve.api.json_body import read_json
from omni_actors.serve.api.openapi import JSON
from omni_actors.serve.api.responses import JSONResponse
from omni_actors.serve.api.schemas import parse
from omni_actors.serve.http.errors import bad_request
from omni_actors.serve.pipelines import Pipelines
from omni_actors.serve.routes.common import request_name
from omni_actors.system import OmniSystem, Reply
from omni_actors.system.texts import first_value

Names = list[str] | None
Needed = Literal["none", "one", "all"]
Seconds = Annotated[float, Meta(gt=0, le=3600)]


class Nothing(msgspec.Struct, frozen=True):
    """No argument."""


class PauseRequest(msgspec.Struct, frozen=True):
    """What happens to the requests that run: see ``OmniSystem.pause_generation``."""

    mode: Literal["abort", "wait", "keep"] = "abort"


class AbortRequest(msgspec.Struct, frozen=True):
    """request_ids: those of responses, or the names of requests; with ``n``, each choice has a suffix "-0", "-1", …"""

    request_id: list[str] = field(name="request_ids")

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "request_id", [request_name(id) for id in self.request_id])


class LoadLoraRequest(msgspec.Struct, frozen=True):
    """lora_path: a directory of the server's machine, as PEFT saves it."""

    name: str = field(name="lora_name")
    directory: str = field(name="lora_path")
    stages: Names = None


class LoraRequest(msgspec.Struct, frozen=True):
    name: str = field(name="lora_name")


class StagesRequest(msgspec.Struct, frozen=True):
    """stages: by default all."""

    stages: Names = None


class ResetPrefixCacheRequest(StagesRequest, frozen=True):
    reset_running_requests: bool = False


class ScaleRequest(msgspec.Struct, frozen=True):
    """See ``OmniSystem.scale``."""

    stage: str
    replicas: int
    drain_s: Annotated[float, Meta(ge=0, le=3600)] | None = None


class SleepRequest(StagesRequest, frozen=True):
    """See ``OmniSystem.sleep``."""

    level: int = 1
    mode: Literal["abort", "wait"] = "abort"


class WakeUpRequest(StagesRequest, frozen=True):
    """tags: parts of an engine; by default all."""

    tags: Names = None


class UpdateWeightsRequest(msgspec.Struct, frozen=True):
    """path: safetensors files on the server's machine. See ``OmniSystem.update_weights``."""

    path: str
    stages: list[str]
    version: str | None = None
    mode: Literal["abort", "wait"] = "wait"


class RPCRequest(msgspec.Struct, frozen=True):
    """A method of the model's workers inside an engine."""

    method: str
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    timeout_s: Seconds = field(default=10.0, name="timeout")
    stages: Names = None


class CallRequest(msgspec.Struct, frozen=True):
    """A capability of the engines."""

    capability: str
    arguments: dict[str, Any] = {}
    stages: Names = None
    timeout_s: Seconds = 10.0


class Operation(NamedTuple):
    """A method of ``OmniSystem``, and the schema of its arguments; None: it has none, and changes nothing (GET).

    needed: how many of the stages must support it. writes_file: whether it writes a file of JSON to its argument
    ``path`` (rule 3).
    """

    method: str
    schema: type[msgspec.Struct] | None
    needed: Needed = "one"
    writes_file: bool = False

    @property
    def names(self) -> dict[str, str]:
        """The client's name of each argument, by the one of the method, or of the engines' capability."""
        if self.schema is None:
            return {}
        own = {each.name: each.encode_name for each in msgspec.structs.fields(self.schema)}
        names = {"lora": own.get("directory", own.get("name", "lora"))}
        return names | ({"arguments": "args"} if "args" in own else {}) | own

    @property
    def http_method(self) -> str:
        return "GET" if self.schema is None else "POST"


OPERATIONS: dict[str, Operation] = {
    "/abort_requests": Operation("abort", AbortRequest),
    "/call": Operation("call", CallRequest),
    "/collective_rpc": Operation("collective_rpc", RPCRequest),
    "/is_paused": Operation("is_paused", None),
    "/is_sleeping": Operation("is_sleeping", None),
    "/list_loras": Operation("list_loras", None),
    "/pause": Operation("pause_generation", PauseRequest, needed="none"),
    "/reset_encoder_cache": Operation("reset_encoder_cache", StagesRequest),
    "/reset_mm_cache": Operation("reset_mm_cache", StagesRequest),
    "/reset_prefix_cache": Operation("reset_prefix_cache", ResetPrefixCacheRequest),
    "/resume": Operation("resume_generation", Nothing),
    "/scale": Operation("scale", ScaleRequest),
    "/sleep": Operation("sleep", SleepRequest, needed="all"),
    "/update_weights": Operation("update_weights", UpdateWeightsRequest, needed="all"),
    "/v1/load_lora_adapter": Operation("add_lora", LoadLoraRequest),
    "/v1/pin_lora_adapter": Operation("pin_lora", LoraRequest),
    "/start_profile": Operation("start_profile", StagesRequest, needed="none"),
    "/stop_profile": Operation("stop_profile", Nothing, writes_file=True),
    "/v1/unload_lora_adapter": Operation("remove_lora", LoraRequest),
    "/wake_up": Operation("wake_up", WakeUpRequest),
}


def handler(operation: Operation) -> Callable[[Request], Awaitable[Response]]:
    """Return the handler of a route."""

    async def handle(request: Request) -> Response:
        system, arguments = await _arguments(request, operation.schema)
        method = getattr(system, operation.method)
        with unsupported_as_501(), renaming(operation.names):
            if operation.writes_file:
                return Response(await _written(method, arguments), media_type=JSON)
            result = method(**arguments)
            if inspect.isawaitable(result):
                result = await result
            return JSONResponse({"result": _plain(result, operation.needed)})

    return handle


async def _written(method: Callable[..., Awaitable[object]], arguments: Mapping[str, Any]) -> bytes:
    """Return what a method writes to its argument ``path``."""
    with tempfile.TemporaryDirectory(prefix="omni-actors-") as folder:
        path = trio.Path(folder) / "written.json"
        await method(path=path, **arguments)
        return await path.read_bytes()


async def _arguments(request: Request, schema: type[msgspec.Struct] | None) -> tuple[OmniSystem, dict[str, Any]]:
    """Return the system that ``pipeline`` names, and the arguments in the query and in the body, which may be empty.

    Raises HTTPError.
    """
    pipelines: Pipelines = request.app.state.pipelines
    fields: dict[str, Any] = dict(request.query_params)
    if schema is None:
        return pipelines.named(fields.get("pipeline")), {}
    fields |= {name: request.query_params.getlist(name) for name in _lists(schema).intersection(fields)}
    fields |= await read_json(request, may_be_empty=True)
    system = pipelines.named(fields.pop("pipeline", None))
    found, others = parse(fields, schema, strict=False)
    if others:
        name = next(iter(others))
        raise bad_request(f"unknown parameter {name!r}", name, "unknown_parameter")
    given = {name: getattr(found, name) for name in schema.__struct_fields__}
    return system, {name: value for name, value in given.items() if value is not None}


@functools.cache
def _lists(schema: type[msgspec.Struct]) -> set[str]:
    """Return the names of the arguments that are lists. In a query, a name stands before each of its values."""
    described = msgspec.inspect.type_info(schema)
    assert isinstance(described, msgspec.inspect.StructType), "a schema is a Struct"
    return {each.encode_name for each in described.fields if _is_list(each.type)}


def _is_list(type: msgspec.inspect.Type) -> bool:
    options = type.types if isinstance(type, msgspec.inspect.UnionType) else (type,)
    return any(isinstance(each, msgspec.inspect.ListType) for each in options)


def _plain(result: Any, needed: Needed = "one") -> Any:
    """Return a result as JSON has it. Raises the error of a replica (rule 2)."""
    if isinstance(result, Mapping) and any(_are_replies(value) for value in result.values()):
        return _replies(result, needed)
    if isinstance(result, msgspec.Struct):
        return {name: _plain(getattr(result, name)) for name in result.__struct_fields__}
    if isinstance(result, list | tuple):
        return [_plain(each) for each in result]
    return msgspec.to_builtins(result)


def _are_replies(value: Any) -> bool:
    return isinstance(value, list) and any(isinstance(each, Reply) for each in value)


_NAMED = (Unsupported, WorkerLost)
"""Errors that a response may name at their replica."""


def _replies(replies: Mapping[str, list[Reply]], needed: Needed) -> dict[str, list[dict[str, Any]]]:
    errors = [reply.error for stage in replies.values() for reply in stage if reply.error is not None]
    named = _NAMED if needed == "none" else Unsupported
    if failures := [error for error in errors if not isinstance(error, named)]:
        raise min(failures, key=lambda error: not isinstance(error, InvalidRequest))
    if errors and needed == "all":
        raise errors[0]
    if needed == "one":
        first_value(replies)
    return {stage: [_reply(reply) for reply in each] for stage, each in replies.items()}


def _reply(reply: Reply) -> dict[str, Any]:
    error: OmniError | None = reply.error
    if not isinstance(error, _NAMED):
        return {"value": msgspec.to_builtins(reply.value)}
    facts = {"stage": error.stage, "capability": error.capability, "why": error.why}
    return {"error": {"code": to_http_error(error).code, **facts}}
