"""Prefill apart from decode: two stages of one model, by the option ``role``.

The stage with the role "prefill" reads prompts as a stage with both roles does, with its prefix cache and adapters. It
sends the keys and values of each prefill chunk while it computes the next one, and at the end the logits of the last
position (``prompt_states``). The stage with the role "decode" puts them into its own cache and chooses every token of
the answer, the first one too. So sampling, penalties, stop strings, structure and log probabilities are those of one
stage, and so is the journal: what was decided is known in "decode" alone.

Rules
1. ``Prefilling`` decides nothing: an entry of its journal is empty. It ends a request with the prompt's last position.
2. ``Decoding`` treats positions that arrive as a prefill whose forward is a copy. A request has a row of the cache from
   its first chunk on, so that a long prompt is copied block by block, between the steps of other requests.
3. A prompt of "decode" waits in host memory while all rows are in use. ``waiting_prompts_mb`` bounds this memory: a
   prompt needs room for all its positions when its first chunk arrives, and frees it as they are copied. The newest
   request is refused, and may be sent again. One prompt always has room. A replayed request is not refused: it may have
   had room before the death. One with a journal needs none, as it had a row before, so there are few of these.
4. Guidance and pooling need one stage for both roles: such a request is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import msgspec
import torch
from torch import Tensor

from omni_actors.stages import base
from omni_actors.stages.autoregressive.language import LanguageEngine, TextRequest, refuse_beyond_context
from omni_actors.stages.autoregressive.options import SplitOptions, TextParams
from omni_actors.stages.autoregressive.prompt_states import (
    PromptHeader,
    ReceivedPrompt,
    StatesShape,
    block_tensors,
    header_of,
    require_consumer,
    require_one_source,
)
from omni_actors.stages.autoregressive.structure import Structure
from omni_actors.stages.refusal import request_work
from omni_actors.stages.tensors import to_wire

R = TypeVar("R", bound=TextRequest[Any])

NO_ROOM = "no_room_for_prompt"
"""The code of a refusal for now: too many prompts wait (rule 3)."""


class Prefilling(LanguageEngine[R]):
    """The role "prefill". An engine lists it before the class with both roles. It sets ``_split``."""

    _split: SplitOptions

    # for the families

    def _prompt_header(self, request: R) -> tuple[PromptHeader, Mapping[str, Tensor]]:
        """Return what the first chunk says of a prompt, and the tensors that the family adds."""
        return PromptHeader(len(request.prompt_tokens), self._weights_version), {}

    def _block_rows(self, request: R) -> Mapping[str, base.TensorLike]:
        """Return the rows of the newest block for a talker."""
        return {}

    # LanguageEngine

    def start(self, request: base.StageRequest) -> None:
        require_consumer(request)
        super().start(request)

    def _new_request(self, request: base.StageRequest) -> R:
        return _unguided(super()._new_request(request))

    def _structure(self, params: TextParams) -> Structure | None:
        return None  # the stage that decodes has it

    def _join_batch(self, request: R, tokens: Sequence[int | None]) -> None:
        super()._join_batch(request, tokens)
        request.prompt_tokens = tokens

    def _prompt_outputs(self, request: R, row: int, count: int) -> Iterator[base.StageOutput]:
        end = self._cache.lengths[row]
        data: Mapping[str, Any] = {}
        more = dict(self._block_rows(request))
        if end == count:
            header, extra = self._prompt_header(request)
            data, tensors = header_of(header, request.prompt_tokens, extra)
            more |= tensors
        for tensors in block_tensors(self._cache.read(row, end - count, count), self._split.chunk_layers):
            yield base.StageOutput(request.id, data=data, downstream={**tensors, **more})
            data, more = {}, {}

    def _next(self, sequences: list[R], logits: Tensor) -> Iterator[base.StageOutput | base.StageFailure]:
        """End a request whose prompt was just computed. logits: (1, vocabulary)."""
        [request] = sequences
        row, block = self._scheduler.rows.index(request), self._split.prefill_chunk
        *others, last = self._prompt_outputs(request, row, (len(request.prompt_tokens) - 1) % block + 1)
        yield from others
        self.abort(request.id)
        downstream = {**last.downstream, "logits": to_wire(logits[0])}
        yield msgspec.structs.replace(last, downstream=downstream, last=True)


class Decoding(LanguageEngine[R]):
    """The role "decode". An engine lists it before the class with both roles. It sets ``_split`` and ``_shape``."""

    _split: SplitOptions
    _shape: StatesShape

    # for the families

    def _prompt_arrived(self, request: R, header: PromptHeader, extra: Mapping[str, Tensor]) -> None:
        """Take what the first chunk says of a prompt. Any exception ends this request only."""

    def _warm_up_extra(self) -> Mapping[str, Tensor]:
        """Return the family's tensors for a prompt of one position."""
        return {}

    # LanguageEngine

    def start(self, request: base.StageRequest) -> None:
        require_one_source(request)
        super().start(request)

    def _new_request(self, request: base.StageRequest) -> R:
        made = _unguided(super()._new_request(request))
        made.received = ReceivedPrompt(self._shape, self._weights_version)
        return made

    def _take(self, request: R, chunk: base.Chunk) -> None:
        received = request.received
        assert received is not None, "the prompt was not complete"
        begins = received.header is None
        if begins:
            with request_work("prompt"):
                size = received.open(chunk).positions
            refuse_beyond_context(size, f"{size} tokens", self._context)
            self._require_room(request)
        with request_work("prompt"):
            arrived = received.feed(chunk)
        if begins:
            assert received.header is not None, "it was opened"
            with request_work("prompt"):
                self._prompt_arrived(request, received.header, received.extra)
            self._join_batch(request, received.tokens)
            received.after_prompt = request.ready - request.prefill_left
            request.ready = 0
        request.ready += arrived + (received.after_prompt if chunk.last else 0)

    def _require_room(self, request: R) -> None:
        """Raise TemporarilyRefused if there is no room for the request's prompt (rule 3)."""
        prompt = request.received
        assert prompt is not None, "its first chunk arrives"
        if request.replayed or request.has_journal:
            return
        others, room = self._waiting_bytes() - prompt.left_bytes, self._room_bytes()
        if others and others + prompt.left_bytes > room:
            message = (
                f"the prompt takes {prompt.left_bytes} bytes until it has a row of the cache; prompts that wait take"
                f" {others} of {room} bytes (waiting_prompts_mb)"
            )
            raise base.TemporarilyRefused(message, code=NO_ROOM)

    def _waiting_bytes(self) -> int:
        """Return the bytes that prompts need until they are in the cache, those of requests with a journal aside."""
        requests = self._requests.values()
        return sum(each.received.left_bytes for each in requests if each.received is not None and not each.has_journal)

    def _room_bytes(self) -> int:
        if (megabytes := self._split.waiting_prompts_mb) is not None:
            return megabytes * 1_000_000
        return self._split.max_batch * self._split.context * self._shape.position_bytes

    def gauges(self) -> Mapping[str, float]:
        """Return the bytes that prompts need until they are in the cache."""
        return {**super().gauges(), "waiting_prompt_bytes": self._waiting_bytes()}

    def _forward(self, rows: list[int], count: int) -> Tensor:
        request = self._scheduler.rows[rows[0]]
        if (received := request.received) is None:
            return super()._forward(rows, count)
        block = received.take(count)
        self._cache.append(rows[0], block.states)
        self._skip(request, block)
        if received.left:
            return torch.empty(1, 0)  # those of the last position count
        request.received = None
        assert received.logits is not None, "they come with the last position"
        return received.logits.to(self._cache.device)

    def warm_up(self) -> None:
        """Decode two tokens behind a prompt of one position, because the first run of each kernel is slow."""
        shape = self._shape
        states = torch.zeros(shape.layers, shape.heads, 1, shape.size, dtype=getattr(torch, shape.dtype))
        data, tensors = header_of(PromptHeader(1, self._weights_version), [0], self._warm_up_extra())
        logits = torch.eye(1, shape.vocabulary)[0]
        tensors |= {"keys": to_wire(states), "values": to_wire(states), "logits": to_wire(logits)}
        self.start(base.StageRequest(0, ("prefill",), self.WARM_UP, downstream=False))
        with suppress(base.InvalidRequest):  # the configured context may be too small
            self.feed(0, base.Chunk(source="prefill", seq=0, last=True, tensors=tensors, data=data))
        while self.busy:
            for _ in self.step():
                pass


def _unguided(request: R) -> R:
    if request.companion is not None:
        message = "guidance_scale: guidance needs a stage that prefills and decodes (role: both)"
        raise base.InvalidRequest(message, param="guidance_scale", code="unsupported_parameter")
    return request


def check_roles(options: SplitOptions) -> None:
    """Raise ValueError if an option does not fit the role."""
    if options.role == "decode" and options.prefix_cache_mb:
        raise ValueError("prefix_cache_mb: the stage that prefills has the prefix cache; remove it from this stage")
    if options.role != "decode" and options.waiting_prompts_mb is not None:
        raise ValueError("waiting_prompts_mb: only a stage with role: decode has prompts that wait")
    if options.role != "prefill" and options.chunk_layers:
        raise ValueError("chunk_layers: only a stage with role: prefill sends keys and values")
