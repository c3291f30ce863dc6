"""What the thinkers of omni models share on vLLM: text, sound and pictures to text, and the talker's rows as they come.

Input, outputs and wire are those of the thinkers on transformers (``omni.thinker``, ``omni.talker``).

Rules
1. Hidden states come out of vLLM's own forward (``_internals.HiddenStateWorker``), keyed by position: those that it
   computes again, after it preempted a request, are not sent again.
2. The prompt's rows go out in pieces that end at multiples of ``PIECE``, however vLLM cuts it between other requests';
   what is left goes with the answer's first token.
3. Prefix caching is off: of what is found in a cache there would be no rows.
4. Text and stop strings are ours: a token's row goes out when no stop string can cut its text off any more.
5. Sounds and pictures are decoded and made into features beside the steps (``omni.media_reader``). vLLM's encoders
   run in its steps.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from omni_actors.stages.autoregressive.text import Answer, Vocabulary
from omni_actors.stages.base import (
    InvalidRequest,
    RequestId,
    StageContext,
    StageFailure,
    StageOutput,
    TensorLike,
)
from omni_actors.stages.multimodal.limits import MediaLimits
from omni_actors.stages.multimodal.processor import OmniProcessor
from omni_actors.stages.multimodal.prompt import OmniPrompt
from omni_actors.stages.omni.media_reader import MediaReader
from omni_actors.stages.omni.positions import is_media, position_grids
from omni_actors.stages.refusal import request_work
from omni_actors.stages.tensors import to_wire
from omni_actors.stages.vllm._internals import HiddenStates
from omni_actors.stages.vllm.engine import Request, VLLMEngine, logprobs_of
from omni_actors.stages.vllm.media import to_prompt
from omni_actors.stages.vllm.options import VLLMThinkerParams

__all__ = ["Thinker", "ThinkerRequest"]

PIECE = 256


class ThinkerRequest(Request):
    """Tensors of a prompt of n positions."""

    collector: OmniPrompt
    params: VLLMThinkerParams
    answer: Answer
    ids: Tensor
    """int64 (n,)."""
    grids: dict[str, Tensor]
    is_media: Tensor
    """Which positions are sound or picture, bool (n,)."""
    rows: Tensor
    """Of the prompt's positions from ``given`` on, (k, hidden)."""
    cached = given = 0
    """Positions whose hidden states were taken; those of the prompt whose rows are on their way."""
    certain = sent = 0
    """Tokens of the answer whose text nothing can cut off any more; those whose rows are on their way."""
    introduced = False
    """Whether the talker has what comes once."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.said: list[Tensor] = []
        """Of the answer's tokens after those sent, (1, hidden) each."""


R = TypeVar("R", bound=ThinkerRequest)


class Thinker(VLLMEngine[R]):
    """``context.model``: a checkpoint directory of all parts."""

    PARAMS = VLLMThinkerParams

    def __init__(self, context: StageContext, config: Any, layers: Sequence[int], ends: Sequence[int]) -> None:
        """config: of the whole model. layers: whose hidden states are captured. ends: tokens that end an answer.

        Raises as ``VLLMEngine`` and ``OmniProcessor`` do.
        """
        assert context.model is not None
        super().__init__(
            context,
            worker_cls="omni_actors.stages.vllm._internals.HiddenStateWorker",
            additional_config={"row_layers": list(layers)},
            enable_prefix_caching=False,
            async_scheduling=False,
            mm_processor_cache_gb=0,  # of no use: an item's name is never used again (see ``media``)
        )
        context.report("reading the processor")
        self._config = config
        limits = MediaLimits(tokens=self._context - 1)
        self._processor = OmniProcessor(context.model, limits=limits)
        self._media_processor = OmniProcessor(  # a tokenizer is not for two threads at once
            context.model, limits=limits
        )
        self._media_reader = MediaReader[Any]()
        said = self._llm.model_config.try_get_generation_config().get("eos_token_id") or ()
        self._vocabulary = Vocabulary(self._processor.tokenizer, [*ends, *([said] if isinstance(said, int) else said)])

    # what a family says for itself

    def _prepared(self, request: R, *, use_audio_in_video: bool) -> None:
        """Take from the request's ids and grids what it needs of them; in the reader's thread where there are media.

        Raises ``InvalidRequest``.
        """

    def _handoff_header(self, request: R) -> dict[str, Tensor]:
        """What the talker gets once, with its first rows."""
        raise NotImplementedError

    def _rows(self, request: R, captured: HiddenStates) -> Tensor:
        """Of these positions of the prompt, (k, hidden)."""
        raise NotImplementedError

    def _row(self, captured: HiddenStates) -> Tensor | None:
        """Of a token of the answer, (1, hidden), where it comes with the forward."""
        return None

    def _token_row(self, token: int) -> Tensor | None:
        """Of a token of the answer, (1, hidden), where it needs no forward."""
        return None

    def _spoken(self, request: R, rows: Tensor) -> Tensor:
        """Of rows of the prompt from ``given`` on, those that the talker gets."""
        return rows

    # in

    @property
    def busy(self) -> bool:
        return self._media_reader.pending or super().busy

    def abort(self, request_id: RequestId) -> None:
        super().abort(request_id)
        self._media_reader.forget(request_id)

    def step(self) -> Iterator[StageOutput | StageFailure]:
        for request_id, reading in self._media_reader.take():
            try:
                with request_work("messages"):
                    prompt = reading.result()
                self._admit(self._requests[request_id], prompt)
            except InvalidRequest as error:
                del self._requests[request_id]
                yield StageFailure(request_id, error)
        if super().busy:
            yield from super().step()
        elif self._media_reader.pending:
            self._media_reader.wait()

    def close(self) -> None:
        super().close()
        self._media_reader.close()

    def _let_go(self) -> None:
        super()._let_go()
        if not self._llm.has_unfinished_requests():
            self._llm.reset_encoder_cache()  # vLLM keeps what encoders made, for items that do not come again

    def _complete(self, request: R) -> None:
        if request.collector.media:
            self._media_reader.read(request.id, lambda: self._read(request, self._media_processor))
        else:
            with request_work("messages"):
                prompt = self._read(request, self._processor)
            self._admit(request, prompt)

    def _read(self, request: R, processor: OmniProcessor) -> Any:
        """vLLM's ``EngineInput``, and all else of the input; in the reader's thread where there are media."""
        inputs = processor(
            request.collector,
            system_prompt=self._options.system_prompt,
            use_audio_in_video=request.params.use_audio_in_video,
        )
        request.ids, request.grids = torch.tensor(inputs.ids), position_grids(inputs.tensors)
        request.is_media = is_media(request.ids, self._config)
        self._prepared(request, use_audio_in_video=inputs.use_audio_in_video)
        return to_prompt(inputs, self._config.thinker_config)

    def _admit(self, request: R, prompt: Any) -> None:
        """Raises ``InvalidRequest``."""
        tokens = len(request.ids)
        request.rows = self._embed([])
        vocabulary = copy.copy(self._vocabulary)
        vocabulary.end = frozenset(request.params.stop_token_ids) | (
            frozenset() if request.params.ignore_eos else self._vocabulary.end
        )
        limit = min(request.params.max_tokens, self._context - tokens)
        request.answer = Answer(vocabulary, tokens, limit, request.params.stop)
        request.sampling.stop_token_ids = sorted(vocabulary.end)
        request.sampling.stop, request.sampling.detokenize = [], False
        self._add(request, prompt, tokens)

    def _embed(self, ids: Any) -> Tensor:
        rows: Tensor = self._llm.collective_rpc("embed", args=(torch.as_tensor(ids, dtype=torch.int64),))[0]
        return rows

    # out

    @torch.inference_mode()
    def _stepped(self) -> Iterator[StageOutput]:
        by_name = {request.internal: request for request in self._requests.values() if request.downstream}
        for captured in self._llm.collective_rpc("take_hidden_states")[0]:
            if (request := by_name.get(captured.request)) is not None:
                self._see(request, captured)
                yield from self._pieces(request)

    def _see(self, request: R, captured: HiddenStates) -> None:
        """Take what was not seen before."""
        new = captured.since(request.cached)
        request.cached += len(new)
        prompt = new.until(len(request.ids))
        if len(prompt):
            request.rows = torch.cat([request.rows, self._rows(request, prompt)])
        if len(prompt) < len(new) and (row := self._row(new.since(len(request.ids)))) is not None:
            request.said.append(row)

    def _pieces(self, request: R) -> Iterator[StageOutput]:
        while len(request.rows) >= PIECE and request.given + PIECE < len(request.ids):
            if downstream := self._downstream(request, self._take(request, PIECE)):
                yield StageOutput(request.id, downstream=downstream)

    @torch.inference_mode()
    def _outputs(self, request: R, output: Any) -> Iterator[StageOutput]:
        (answer,) = output.outputs
        data = logprobs_of(output, answer)
        for token in answer.token_ids:
            data |= request.answer.push(token)
            request.tokens += 1
            if not request.answer.holds:
                request.certain = request.tokens
        last = output.finished or request.answer.finish_reason is not None
        if output.finished and request.answer.finish_reason is None:  # vLLM has a reason of its own
            data |= {"text": "", "finish_reason": answer.finish_reason}
            data |= {"prompt_tokens": request.prompt_tokens, "completion_tokens": request.tokens}
        if request.downstream and not last and (row := self._token_row(answer.token_ids[-1])) is not None:
            request.said.append(row)
        rows = []
        if request.downstream:
            count = max(0, request.certain - request.sent)
            going, request.said = request.said[:count], request.said[count:]
            request.sent += len(going)
            rows = [*self._take(request, len(request.rows)), *going]
        downstream = self._downstream(request, rows)
        if last:
            del self._requests[request.id]
            if not output.finished:
                self._llm.abort_request([str(request.id)])
        if data or downstream:
            yield StageOutput(request.id, data=data, downstream=downstream, last=last)

    def _take(self, request: R, count: int) -> list[Tensor]:
        """Of the prompt's next rows, ``count`` of them, what the talker gets."""
        rows, request.rows = request.rows[:count], request.rows[count:]
        spoken = self._spoken(request, rows)
        request.given += count
        return [spoken] if len(spoken) else []

    def _downstream(self, request: R, rows: Sequence[Tensor]) -> Mapping[str, TensorLike]:
        """The first time with what comes once."""
        if not request.downstream:
            return {}
        downstream = {} if request.introduced else self._handoff_header(request)
        request.introduced = True
        if rows:
            downstream["rows"] = torch.cat(list(rows))
        return {name: to_wire(tensor) for name, tensor in downstream.items()}
