"""The blocks of vLLM's KV cache on their way from a stage that prefills to one that decodes.

Wire: the chunks of one request, in order. A *block* is a block of vLLM's cache: keys and values of all layers, for as
many positions as vLLM's ``block_size``, in the layout of vLLM's attention kernels. One chunk has one block.

chunk               tensors                                           data
------------------  ------------------------------------------------  ------------------------------------------------
every one           ``block``: (layers, then the shape of a layer's    ``layout``: ``RingConnector.layout``
                    block)
first of a request  ``tokens``: int64 (positions,)                    ``prompt``: the fields of ``PromptHeader``
last                                                                  ``kv_transfer_params``: what vLLM's request has
                                                                      returned, for the request of the next stage

Rules
1. Blocks come in order of position. What the last one has behind the prompt is not used.
2. The number of chunks and their shapes follow from the prompt alone. So an incarnation that starts again sends the
   same chunks, up to rounding, and the consumer takes those that it lacks.
3. A *rejected* transfer is recomputed: the consumer drops its blocks and computes the prompt from its tokens. It
   rejects what was computed with another version of the weights, what has no room (``waiting_prompts_mb``), and what
   does not fit its cache. Only a chunk without the tokens of the prompt ends the request.
4. Each block has its own layout: after a death, the others may come from a worker on a node with another kind of CPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from torch import Tensor

from omni_actors.stages.autoregressive.prompt_states import MISMATCH, PARAM, PromptHeader, header_of
from omni_actors.stages.base import Chunk, InvalidRequest
from omni_actors.stages.refusal import beyond_context, validated
from omni_actors.stages.tensors import to_torch, to_wire
from ringbuf import Tensor as WireTensor


class _ChunkData(msgspec.Struct, frozen=True):
    prompt: PromptHeader | None = None
    kv_transfer_params: dict[str, Any] | None = None
    layout: str = ""


def block_chunk(
    block: Tensor, layout: str, header: PromptHeader | None, tokens: list[int]
) -> tuple[dict[str, Any], dict[str, WireTensor]]:
    """Return the data and the tensors of a chunk. header: None in all chunks but the first, and in it with tokens."""
    tensors = {"block": to_wire(block, deferred=True)}
    if header is None:
        return {"layout": layout}, tensors
    data, more = header_of(header, tokens, {})
    return {"layout": layout, **data}, {**tensors, **more}


class Room:
    """Host memory for blocks that wait until vLLM has room for them in its cache.

    size: bytes. One prompt always has room.
    """

    def __init__(self, size: int) -> None:
        self.size, self.used = size, 0

    def take(self, size: int) -> bool:
        """Reserve bytes; return whether there was room."""
        if self.used and self.used + size > self.size:
            return False
        self.used += size
        return True

    def give_back(self, size: int) -> None:
        """Free bytes that were reserved."""
        self.used -= size


class ReceivedBlocks:
    """Collects the chunks of one request.

    context: the largest number of positions of a prompt. block_size: positions of a block. layout: of this stage's
    blocks. weights_version: of this stage. room: where memory for the blocks is reserved.
    """

    def __init__(self, context: int, block_size: int, layout: str, weights_version: str | None, room: Room) -> None:
        self._context, self._block_size, self._layout = context, block_size, layout
        self._version, self._room = weights_version, room
        self.tokens: list[int] = []
        self.blocks: list[Tensor] = []
        """In host memory, in order of position."""
        self.params: Mapping[str, Any] = {}
        """``kv_transfer_params`` of the stage that has prefilled, once all has arrived."""
        self.rejected: str | None = None
        """Why the transfer is rejected, if it is."""
        self._reserved = 0

    def feed(self, chunk: Chunk) -> bool:
        """Take a chunk. Return whether all has arrived. Raises InvalidRequest."""
        data = validated(chunk.data, _ChunkData)
        if not self.tokens:
            self._take_header(chunk, data.prompt)
        block = chunk.tensors.get("block")
        if block is None:
            self.reject("a chunk has no block")
        elif data.layout != self._layout:
            self.reject(f"a block has the layout {data.layout!r}; this stage has {self._layout!r}")
        elif self.rejected is None:
            self.blocks.append(to_torch(block))
        if chunk.last:
            self.params = data.kv_transfer_params or {}
            if len(self.blocks) != -(-len(self.tokens) // self._block_size):
                self.reject(f"found {len(self.blocks)} blocks of {self._block_size} positions")
        return chunk.last

    def reject(self, why: str) -> None:
        """Drop the blocks, because the transfer is rejected."""
        self.rejected = self.rejected or why
        self.blocks = []
        self.free()

    def free(self) -> None:
        """Give the memory of the blocks back, when vLLM has copied or dropped them."""
        self._room.give_back(self._reserved)
        self._reserved = 0

    def _take_header(self, chunk: Chunk, header: PromptHeader | None) -> None:
        tokens = chunk.tensors.get("tokens")
        if header is None or tokens is None or (tokens.dtype, tuple(tokens.shape)) != ("int64", (header.positions,)):
            message = "the stages that prefill and decode do not fit: the first chunk has no tokens of the prompt"
            raise InvalidRequest(message, param=PARAM, code=MISMATCH)
        if header.positions >= self._context:
            message = (
                f"the prompt has {header.positions} tokens; the stage that decodes has a context of {self._context}"
            )
            raise beyond_context(message)
        self.tokens = to_torch(tokens).tolist()
        if min(self.tokens) < 0:
            message = "the stages that prefill and decode do not fit: the prompt has positions without tokens"
            raise InvalidRequest(message, param=PARAM, code=MISMATCH)
        if header.weights_version != self._version:
            found, own = header.weights_version or "0", self._version or "0"
            self.reject(f"the prompt was computed with version {found!r} of the weights; this stage has {own!r}")
            return
        block = chunk.tensors.get("block")
        size = 0 if block is None else block.nbytes * -(-header.positions // self._block_size)
        if self._room.take(size):
            self._reserved = size
        else:
            self.reject(f"{size} bytes have no room: {self._room.used} of {self._room.size} are used")
