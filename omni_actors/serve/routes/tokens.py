"""POST /tokenize and /detokenize, as vLLM has them. An engine answers between two steps; no request is made."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from omni_actors.serve.api.errors import unsupported_as_501
from omni_actors.serve.api.json_body import read_json
from omni_actors.serve.api.responses import JSONResponse
from omni_actors.serve.api.schemas import DetokenizeRequest, TokenizeRequest, effective, parse
from omni_actors.serve.http.errors import bad_request
from omni_actors.serve.routes.common import choose_system
from omni_actors.system import OmniSystem


async def tokenize(request: Request) -> Response:
    """Return the tokens of a prompt or of a conversation."""
    system, body = _open(request, await read_json(request), TokenizeRequest)
    if (body.prompt is None) == (body.messages is None):
        raise bad_request("one of prompt and messages was expected", "prompt", "missing_required_parameter")
    with unsupported_as_501():
        found = await system.tokenize(
            body.prompt,
            messages=body.messages,
            tools=msgspec.to_builtins(body.tools),
            chat_template_kwargs=body.chat_template_kwargs,
            add_special_tokens=body.add_special_tokens,
        )
    strings = found.token_strs if body.return_token_strs else None
    count = {"count": len(found.tokens), "max_model_len": found.max_model_len}
    return JSONResponse({**count, "tokens": found.tokens, "token_strs": strings})


async def detokenize(request: Request) -> Response:
    """Return the text of tokens."""
    system, body = _open(request, await read_json(request), DetokenizeRequest)
    with unsupported_as_501():
        return JSONResponse({"prompt": await system.detokenize(body.tokens)})


def _open(request: Request, fields: dict[str, Any], schema: Any) -> tuple[OmniSystem, Any]:
    body, others = parse(fields, schema)
    system = choose_system(request, body.model)
    for name in effective(others, system.pipeline):
        raise bad_request(f"unknown parameter {name!r}", name, "unknown_parameter")
    return system, body
