"""What the handlers of the model routes share."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import msgspec
from starlette.requests import Request

from omni_actors.config import Pipeline
from omni_actors.generation import Generation
from omni_actors.outputs import Output
from omni_actors.serve.access.admission import SCOPE_KEY, AdmissionTicket
from omni_actors.serve.api import schemas
from omni_actors.serve.api.generations import Generations
from omni_actors.serve.http.errors import bad_request
from omni_actors.serve.pipelines import Pipelines
from omni_actors.system import OmniSystem
from omni_actors.system.pictures import seed_of
from omni_actors.validation import explained

SESSION_HEADER = "X-Session-ID"
STORED_PREFIX = "resp_"
"""The beginning of the ids of responses that the server may store."""
_NAMED_CHARACTERS = 12


class _Need(NamedTuple):
    """What a route needs of a pipeline.

    accepts: the kinds of input, all of them. emits: modalities, one of which is enough. refusal: what a pipeline that
    lacks them does not do.
    """

    accepts: set[str]
    emits: set[str]
    refusal: str

    def is_met(self, pipeline: Pipeline) -> bool:
        stages = pipeline.stages.values()
        accepted = {kind for stage in stages for kind in stage.accepts}
        return self.accepts <= accepted and not self.emits.isdisjoint(stage.emits for stage in stages)


_TRANSCRIPTS = _Need({"audio"}, {"transcript"}, "writes no transcripts")
_ANSWERS = _Need({"messages"}, {"text"}, "does not answer in text")
_NEEDS = {
    "/v1/chat/completions": (_Need({"messages"}, {"text", "image"}, "does not chat"),),
    "/v1/completions": (_ANSWERS,),
    "/v1/responses": (_ANSWERS,),
    "/v1/audio/speech": (_Need({"script"}, {"audio"}, "does not read texts aloud"),),
    "/v1/audio/transcriptions": (_TRANSCRIPTS,),
    "/v1/audio/translations": (_TRANSCRIPTS,),
    "/v1/realtime": (_ANSWERS, _TRANSCRIPTS),
    "/v1/images/generations": (_Need({"messages"}, {"image"}, "makes no pictures"),),
    "/v1/images/edits": (_Need({"messages", "image"}, {"image"}, "edits no pictures"),),
}
"""What a pipeline needs to serve a route: any one of these. Routes that are not here need nothing of the graph.

An engine without embeddings or tokens answers 501 itself.
"""
_NAMED = ("/v1/chat/completions", "/v1/audio/speech", "/v1/audio/transcriptions", "/v1/images/generations")
"""A refusal names those of these routes that serve the pipeline. It names no others: its engines may refuse them."""


def open_body(
    request: Request, fields: Mapping[str, Any], schema: type[schemas.OfModel], *, strict: bool = True
) -> tuple[OmniSystem, schemas.OfModel, dict[str, Any]]:
    """Return the system, the validated body, and the engines' parameters in it. Raises HTTPError.

    The name of a LoRA adapter as the model becomes the parameter ``lora``. A body without a model means the only
    pipeline of the server.

    fields, schema, strict: see ``schemas.parse``.
    """
    if "model" not in fields:
        pipelines: Pipelines = request.app.state.pipelines
        fields = {**fields, "model": pipelines.choose(None).pipeline.name}
    body, params = schemas.parse(fields, schema, strict=strict)
    system = choose_system(request, body.model)
    params = schemas.effective(params, system.pipeline)
    if not strict:
        params = typed(params, system.pipeline)
    if body.model != system.pipeline.name:
        params["lora"] = body.model
    return system, body, params


def typed(params: Mapping[str, Any], pipeline: Pipeline) -> dict[str, Any]:
    """Return the engines' parameters of a form, whose values are strings, with the types that the engines declare.

    A parameter that no engine declares stays as it is. Raises HTTPError for a value that an engine would refuse: the
    engine would only say that it is text.
    """
    found = dict(params)
    for stage in pipeline.stages:
        declared = pipeline.spec(stage).params
        for field in msgspec.structs.fields(declared) if declared is not None else ():
            if field.name in params:
                try:
                    found[field.name] = msgspec.convert(params[field.name], field.type, strict=False)
                except msgspec.ValidationError as error:
                    reason, _ = explained(error, field.type, params[field.name])
                    raise bad_request(f"{field.name}: {reason}", field.name) from error
    return found


def session_of(request: Request) -> str | None:
    """Return the name of the conversation that a request belongs to, from its header ``SESSION_HEADER``."""
    return request.headers.get(SESSION_HEADER)


def choose_system(request: Request, model: str | None) -> OmniSystem:
    """Return the system that serves a model, and let the request take its place there. Raises HTTPError.

    model: None stands for the only pipeline of the server.
    """
    pipelines: Pipelines = request.app.state.pipelines
    system = pipelines.choose(model)
    require_served(request.scope["path"], system.pipeline)
    request.scope[SCOPE_KEY].choose(system)
    return system


def require_served(route: str, pipeline: Pipeline) -> None:
    """Refuse a pipeline that cannot do what a route does. Raises HTTPError."""
    if not _is_served(route, pipeline):
        served = ", ".join(each for each in _NAMED if _is_served(each, pipeline))
        advice = f"; it serves {served}" if served else ""
        message = f"model: {pipeline.name!r} {_NEEDS[route][0].refusal}{advice}"
        raise bad_request(message, "model", "unsupported_modality")


def _is_served(route: str, pipeline: Pipeline) -> bool:
    return route not in _NEEDS or any(need.is_met(pipeline) for need in _NEEDS[route])


def text_parameters(body: schemas.TextBody) -> list[tuple[str, str, Any]]:
    """Return what the fields of ``TextBody`` mean to the engines: their name, the client's name, the value."""
    stop = [body.stop] if isinstance(body.stop, str) else body.stop
    match body.response_format:
        case schemas.JSONSchemaFormat(json_schema=wanted):
            structure: dict[str, Any] | None = {"json": wanted.schema}
        case schemas.JSONFormat():
            structure = {"json_object": True}
        case _:
            structure = None
    return [
        ("max_tokens", "max_tokens", body.max_tokens),
        ("stop", "stop", stop),
        ("structured_outputs", "response_format", structure),
    ]


def leave_out_special_tokens(params: dict[str, Any]) -> None:
    """Let the tokenizer add none of its special tokens, unless the client's own arguments for it say otherwise."""
    arguments = params.get("tokenization_kwargs", {})
    if isinstance(arguments, Mapping):  # else an engine refuses them
        params["tokenization_kwargs"] = {"add_special_tokens": False, **arguments}


def raw_prompts(given: str | Sequence[Any], param: str) -> list[dict[str, Any]]:
    """Return the raw prompts of a body: of one text or list of token ids, or of a list of these. Raises HTTPError.

    param: the name of their field.
    """
    several: Sequence[Any] = [given] if isinstance(given, str) or isinstance(given[0], int) else given
    kinds = {type(each) for each in several}
    if len(kinds) > 1 or any(isinstance(each, list) and not each for each in several):
        raise bad_request(f"{param}: texts or lists of token ids were expected, all of one kind", param)
    if kinds == {list} and any(type(token) is not int for each in several for token in each):
        raise bad_request(f"{param}: token ids are integers", param)
    key = "prompt" if kinds == {str} else "prompt_token_ids"
    return [{key: each} for each in several]


def require_accepted(files: Iterable[tuple[str, str]], pipeline: Pipeline) -> None:
    """Refuse files that no stage accepts, before they are fetched or decoded. Raises HTTPError.

    files: the kind of each, and the parameter that contains it.
    """
    accepted = {kind for stage in pipeline.stages.values() for kind in stage.accepts}
    for kind, param in files:
        if kind not in accepted:
            known = ", ".join(map(repr, sorted(accepted)))
            message = f"{param}: {pipeline.name!r} does not accept {kind}; accepted: {known}"
            raise bad_request(message, param, "unsupported_input")


async def begin_choices(
    ticket: AdmissionTicket,
    system: OmniSystem,
    body: schemas.ChoicesBody,
    submits: Sequence[Callable[..., Generation]],
    id: str,
) -> Generations:
    """Begin ``n`` generations of each submission, which takes the seed and the request's identifier.

    The choices of the first submission come first. ticket: it is released. id: of the response. ``request_name`` makes
    the identifier of a single request from it. With several requests, each identifier ends with the choice's number.
    Raises HTTPError, and as ``generate`` does. Cancellation: none of them runs.
    """
    count, most = body.n * len(submits), system.pipeline.limits.max_requests
    if count > most:
        message = f"n: {count} answers in all were asked for; this server works on {most} at a time"
        raise bad_request(message, "n", "too_many_choices")
    seeds = [seed_of(body.seed, at) for at in range(body.n)]
    begun = [partial(submit, seed=seed) for submit in submits for seed in seeds]
    name = request_name(id)
    names = [name] if count == 1 else [f"{name}-{at}" for at in range(count)]

    def begin(submit: Callable[..., Generation], name: str) -> Generation:
        ticket.pass_place()
        return submit(request_id=name)

    submits = [partial(begin, *each) for each in zip(begun, names, strict=True)]
    try:
        return await Generations.begin(submits, on_first=lambda: ticket.take_places(count - 1))
    finally:
        ticket.release()


def request_name(id: str) -> str:
    """Return the name of the request behind a response: in the live state, in logs, in traces, and for an abort.

    It is the response's id. But with the id of a response that the server stores, a client can read, continue and
    delete it, so there the name has the first characters only; 74 random bits of the id stay unknown.
    """
    return id[: len(STORED_PREFIX) + _NAMED_CHARACTERS] if id.startswith(STORED_PREFIX) else id


class Completion:
    """The objects of OpenAI's chat and completion APIs for one response.

    Args:
        prefix: of the response's id.
        kind: the type of the objects.
        body: the request.
        prompts: how many it has. Each has ``body.n`` choices.
    """

    def __init__(self, prefix: str, kind: str, body: schemas.TextBody, prompts: int = 1) -> None:
        self.created = int(time.time())
        self.id = f"{prefix}{uuid.uuid4().hex}"
        self._head = {"id": self.id, "object": kind, "created": self.created, "model": body.model}
        self._n = body.n
        self.count = prompts * body.n
        """The number of choices."""
        self.finish_reasons = ["stop"] * self.count
        """The finish reason of each choice; "stop" until another one is known."""
        self._tokens: dict[int, tuple[int, int]] = {}
        """The tokens of the prompt and of the answer, by choice."""

    def add(self, index: int, output: Output) -> str:
        """Take an output of a choice into account, and return the text that it adds."""
        self.finish_reasons[index] = output.data.get("finish_reason", self.finish_reasons[index])
        if "completion_tokens" in output.data:
            self._tokens[index] = output.data["prompt_tokens"], output.data["completion_tokens"]
        return output.delta if isinstance(output.delta, str) and output.modality == "text" else ""

    @property
    def usage(self) -> dict[str, int] | None:
        """The tokens so far, each prompt counted once; None if no engine counts them."""
        if not self._tokens:
            return None
        prompt = sum(tokens for index, (tokens, _) in self._tokens.items() if index % self._n == 0)
        completion = sum(tokens for _, tokens in self._tokens.values())
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}

    def choice(self, index: int, finish_reason: str | None, **content: Any) -> dict[str, Any]:
        """Return a choice. content: its text, message or delta, and its logprobs if it has any."""
        return {"index": index, "logprobs": None, **content, "finish_reason": finish_reason}

    def chunk(self, index: int, finish_reason: str | None = None, **content: Any) -> dict[str, Any]:
        """Return the object of a stream that has a part of one choice."""
        return {**self._head, "choices": [self.choice(index, finish_reason, **content)], "usage": None}

    def whole(self, choices: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the object of a whole response."""
        return {**self._head, "choices": choices, "usage": self.usage}

    def usage_object(self) -> dict[str, Any]:
        """Return the last object of a stream whose client asked for the usage."""
        return {**self._head, "choices": [], "usage": self.usage}
