"""POST /v1/embeddings: pooled hidden states of the pipeline's language model. Texts bypass the chat template."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import trio
from starlette.requests import Request
from starlette.responses import Response

from omni_actors.serve.access.admission import SCOPE_KEY
from omni_actors.serve.api.errors import renaming, unsupported_as_501
from omni_actors.serve.api.json_body import read_json
from omni_actors.serve.api.schemas import EmbeddingRequest
from omni_actors.serve.media.base64_data import to_base64
from omni_actors.serve.routes.common import leave_out_special_tokens, open_body, raw_prompts
from omni_actors.system import Embedding


async def embeddings(request: Request) -> Response:
    """Embed one or several texts."""
    system, body, params = open_body(request, await read_json(request), EmbeddingRequest)
    prompts = raw_prompts(body.input, "input")
    if not body.add_special_tokens:
        leave_out_special_tokens(params)
    request.scope[SCOPE_KEY].release()
    names = dict.fromkeys(("prompt", "prompt_token_ids", "messages"), "input")
    with unsupported_as_501(), renaming(names):
        found = await system.encode(prompts, pooling=body.pooling, normalize=body.normalize, **params)
    return Response(await _object(body, found), media_type="application/json")


async def _object(body: EmbeddingRequest, found: Sequence[Embedding]) -> bytes:
    """Return the response as JSON. It is encoded text by text, with a checkpoint between them."""
    entries = []
    for index, each in enumerate(found):
        await trio.lowlevel.checkpoint()
        vector = each.vector
        value: Any = to_base64(vector.tobytes()) if body.encoding_format == "base64" else vector.tolist()
        entries.append(msgspec.Raw(msgspec.json.encode({"object": "embedding", "index": index, "embedding": value})))
    tokens = sum(each.prompt_tokens for each in found)
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return msgspec.json.encode({"object": "list", "data": entries, "model": body.model, "usage": usage})
