"""Prefill apart from decode on vLLM: two stages of one model, by the option ``role``.

``autoregressive.roles`` says what the roles are. Here the blocks of vLLM's cache travel (``transfer``), and a connector
of vLLM saves and loads them (``connector``).

Rules
1. The stage with the role "prefill" lets vLLM compute the prompt and one token, which it drops. It decides nothing: an
   entry of its journal is empty.
2. The stage with the role "decode" gives vLLM a request when all blocks have arrived in host memory. vLLM loads them
   and computes the last position again, so it chooses every token of the answer, the first one too.
3. The ``kv_transfer_params`` that vLLM returns in "prefill" are those of the request in "decode". No client sets them.
4. vLLM in "decode" computes a prompt whose transfer is rejected (``transfer``, rule 3). It does so for every request
   with ``prompt_logprobs``, which need the forwards of the prompt.
5. Several answers (``n``) and embeddings need one stage for both roles: such a request is refused.
6. A stage has one device: the blocks are those of one rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import msgspec
from torch import Tensor
from vllm import SamplingParams
from vllm.inputs.engine import tokens_input

from omni_actors.stages import base
from omni_actors.stages.autoregressive.prompt_states import PromptHeader, require_consumer, require_one_source
from omni_actors.stages.llm.prompt import Prompt
from omni_actors.stages.refusal import validated
from omni_actors.stages.vllm.connector import SavedBlock, transfer_config
from omni_actors.stages.vllm.options import VLLMParams, VLLMSplitOptions
from omni_actors.stages.vllm.text import TextEngine, TextRequest
from omni_actors.stages.vllm.transfer import ReceivedBlocks, Room, block_chunk

WORKER = "omni_actors.stages.vllm.connector.TransferWorker"
WAITING_MB = 1024
TRANSFER = "kv_transfer_params"
"""The name of vLLM's parameters of a transfer, in a request's ``extra_args`` and in our chunks."""


class _SplitEngine(TextEngine):
    """What both roles share."""

    ROLE: ClassVar[str]

    def __init__(self, context: base.StageContext) -> None:
        """Raises as ``TextEngine`` does, also for arguments that do not fit the role."""
        super().__init__(
            context,
            worker_cls=WORKER,
            kv_transfer_config=transfer_config(self.ROLE),
            async_scheduling=False,
            tensor_parallel_size=1,
            pipeline_parallel_size=1,
            speculative_config=None,
        )
        self._block_size: int = self._llm.vllm_config.cache_config.block_size
        [self._layout] = self._llm.collective_rpc("layout")

    def _params(self, request: base.StageRequest) -> VLLMParams:
        """Raises InvalidRequest."""
        params = validated(request.params, VLLMParams)
        if params.n != 1:
            message = "n: several answers need a stage that prefills and decodes (role: both)"
            raise base.InvalidRequest(message, param="n", code="unsupported_parameter")
        return params


class PrefillRequest(TextRequest[Prompt]):
    """One request whose prompt is computed."""

    tokens: list[int]
    end: Tensor | None = None
    """The last block, once it was computed."""

    def use(self, tokens: list[int]) -> None:
        """Take the tokens of the prompt."""
        self.tokens = tokens
        extra = {TRANSFER: {"do_remote_decode": True}}
        self.sampling = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False, extra_args=extra)


class PrefillingEngine(_SplitEngine):
    """The role "prefill"."""

    ROLE = "prefill"

    def start(self, request: base.StageRequest) -> None:
        require_consumer(request)
        super().start(request)

    def _new_request(self, request: base.StageRequest) -> PrefillRequest:
        return PrefillRequest(request, self._params(request), Prompt(request.sources))

    def _encode(self, request: TextRequest[Any]) -> Any:
        if request.collector.raw.is_embedded:
            message = "embeds: embeddings need a stage that prefills and decodes (role: both)"
            raise base.InvalidRequest(message, param="embeds", code="unsupported_parameter")
        prompt = super()._encode(request)
        assert isinstance(request, PrefillRequest)
        request.use(prompt["prompt_token_ids"])
        return prompt

    def _prompt_outputs(self) -> Iterator[base.StageOutput]:
        """Send the blocks that the last step has completed. The last one of a prompt waits for vLLM's answer."""
        by_id = {request.internal_id: request for request in self._requests.values()}
        [saved] = self._llm.collective_rpc("take_saved")
        for block in saved:
            request = by_id.get(block.request)
            assert request is None or isinstance(request, PrefillRequest)
            if request is None:
                continue
            if (block.number + 1) * self._block_size >= len(request.tokens):
                request.end = block.tensor
            else:
                data, tensors = self._chunk(request, block)
                yield base.StageOutput(request.id, data=data, downstream=tensors)

    def _outputs(self, request: TextRequest[Any], output: Any) -> Iterator[base.StageOutput]:
        assert isinstance(request, PrefillRequest)
        assert request.end is not None, "the last block is complete with the prompt"
        self._forget(request)
        number = math.ceil(len(request.tokens) / self._block_size) - 1
        data, tensors = self._chunk(request, SavedBlock(request.internal_id, number, request.end))
        data |= {TRANSFER: output.kv_transfer_params}
        yield base.StageOutput(request.id, data=data, downstream=tensors, last=True)

    def _chunk(self, request: PrefillRequest, block: SavedBlock) -> tuple[dict[str, Any], Mapping[str, Any]]:
        header = None if block.number else PromptHeader(len(request.tokens), self._weights_version)
        return block_chunk(block.tensor, self._layout, header, request.tokens)


class DecodeRequest(TextRequest[ReceivedBlocks]):
    """One request whose answer is written."""

    received: ReceivedBlocks | None = None
    """Its blocks, while they may be in host memory."""


class DecodingEngine(_SplitEngine):
    """The role "decode"."""

    ROLE = "decode"

    def __init__(self, context: base.StageContext) -> None:
        super().__init__(context)
        options = msgspec.convert(context.options, VLLMSplitOptions)
        self._room = Room((options.waiting_prompts_mb or WAITING_MB) * 1_000_000)
        self._loaded = self._recomputed = 0

    def start(self, request: base.StageRequest) -> None:
        require_one_source(request)
        super().start(request)

    def _new_request(self, request: base.StageRequest) -> DecodeRequest:
        received = ReceivedBlocks(
            context=self._context,
            block_size=self._block_size,
            layout=self._layout,
            weights_version=self._weights_version,
            room=self._room,
        )
        made = DecodeRequest(request, self._params(request), received)
        made.received = received
        return made

    def _encode(self, request: TextRequest[Any]) -> Any:
        tokens = request.collector.tokens
        request.prompt_tokens = len(tokens)
        return tokens_input(tokens)

    def _join_batch(self, request: TextRequest[Any], prompt: Any) -> None:
        received, name = request.collector, str(request.id)
        params = {} if received.rejected else {**received.params, "positions": len(received.tokens), "transfer": name}
        request.sampling.extra_args = {**(request.sampling.extra_args or {}), TRANSFER: params}
        if received.blocks:
            self._llm.collective_rpc("offer", args=(name, received.blocks))
            received.blocks = []
        super()._join_batch(request, prompt)

    def _outputs_behind(self, request: TextRequest[Any], outputs: Sequence[Any]) -> Iterator[base.StageOutput]:
        yield from super()._outputs_behind(request, outputs)
        if request.id not in self._requests and isinstance(request, DecodeRequest):  # it needs no blocks
            self._drop(request)

    def _outputs(self, request: TextRequest[Any], output: Any) -> Iterator[base.StageOutput]:
        assert isinstance(request, DecodeRequest)
        if (received := request.received) is not None:
            is_loaded = not self._drop(request) and received.rejected is None
            self._loaded += is_loaded
            self._recomputed += not is_loaded
        yield from super()._outputs(request, output)

    def abort(self, request_id: base.RequestId) -> None:
        request = self._requests.get(request_id)
        super().abort(request_id)
        if isinstance(request, DecodeRequest):
            self._drop(request)

    def gauges(self) -> dict[str, float]:
        """Return those of the base class, how many prompts were loaded and recomputed, and the bytes that wait."""
        own = {"prompts_loaded": self._loaded, "prompts_recomputed": self._recomputed}
        return {**super().gauges(), **own, "waiting_prompt_bytes": self._room.used}

    def _drop(self, request: DecodeRequest) -> bool:
        """Free the host memory of a request's blocks; return whether vLLM was offered some that it has not loaded."""
        if request.received is None:
            return False
        request.received.free()
        request.received = None
        [dropped] = self._llm.collective_rpc("withdraw", args=(str(request.id),))
        return bool(dropped)


ENGINES: Mapping[str, type[TextEngine]] = {"both": TextEngine, "prefill": PrefillingEngine, "decode": DecodingEngine}


def open_text(context: base.StageContext) -> TextEngine:
    """Load the engine of the stage's role. Raises as ``TextEngine`` does, and ValueError for another role's option."""
    options = msgspec.convert(context.options, VLLMSplitOptions)
    if options.role != "decode" and options.waiting_prompts_mb is not None:
        raise ValueError("waiting_prompts_mb: only a stage with role: decode has prompts that wait")
    return ENGINES[options.role](context)
