"""What the thinkers of omni models on vLLM share: text, audio, images and video to text, and rows for the talker.

Input, outputs and wire are those of the thinkers on transformers (``omni.thinker``, ``omni.talker``).

Rules
1. Hidden states come out of vLLM's own forward (``_internals.HiddenStateWorker``), keyed by position. Positions that
   vLLM computes again after a preemption are not sent again.
2. Prompt rows go out in chunks that end at multiples of ``CHUNK``, wherever vLLM cuts the prompt. The rest goes with
   the answer's first token.
3. Prefix caching is off, because positions found in a cache would have no rows.
4. This engine detokenizes and finds stop strings itself, because a token's row must wait until no stop string can cut
   off its text (``omni.handoff``).
5. A resumed request puts an output out again when the rows are there that it had: those of all positions before the
   output's last token.
6. Media are read while the steps go on (``omni.prompt_engine``). vLLM's encoders run in its steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import msgspec
import torch
from torch import Tensor

from omni_actors.stages.autoregressive import tokenizing
from omni_actors.stages.autoregressive.text import AnswerText, Vocabulary
from omni_actors.stages.base import MOST_UNDECLARED, Decisions, StageContext, StageOutput, StageRequest
from omni_actors.stages.multimodal.processor import OmniInputs
from omni_actors.stages.multimodal.prompt import OmniPrompt
from omni_actors.stages.omni.handoff import TalkerHandoff
from omni_actors.stages.omni.prompt_engine import OmniPromptEngine, OmniRequest
from omni_actors.stages.vllm._internals import HiddenStates
from omni_actors.stages.vllm.decided import Entry
from omni_actors.stages.vllm.engine import VLLMEngine, VLLMRequest
from omni_actors.stages.vllm.media import to_prompt
from omni_actors.stages.vllm.options import VLLMThinkerParams

CHUNK = 256


class ThinkerRequest(OmniRequest, VLLMRequest[OmniPrompt]):
    """One request. ``computed``: positions whose hidden states were taken.

    vLLM decides the last output's tokens again, and finds the end of the answer by itself: rows come from forwards.
    """

    DECIDES_LAST_AGAIN = True
    params: VLLMThinkerParams
    answer: AnswerText
    computed = 0

    def __init__(self, request: StageRequest, params: VLLMThinkerParams, collector: OmniPrompt) -> None:
        super().__init__(request, params, collector)
        self._undeclared: list[int] = []

    def decide(self, tokens: Iterable[int]) -> None:
        """Note tokens that vLLM has chosen."""
        self._undeclared += tokens

    @property
    def is_due(self) -> bool:
        """Whether the tokens are to be declared now, also without a text."""
        return len(self._undeclared) >= MOST_UNDECLARED

    def decisions(self, data: Mapping[str, Any]) -> Decisions:
        """Declare the tokens that no output has declared yet, in the output with this data."""
        tokens, self._undeclared = tuple(self._undeclared), []
        return self.declare(Entry(0, tokens, data))


R = TypeVar("R", bound=ThinkerRequest)


class Thinker(OmniPromptEngine[R], VLLMEngine[R]):
    """A thinker on vLLM. ``context.model``: the directory of the whole model's checkpoint."""

    PART = "thinker"
    WORKER = "omni_actors.stages.vllm._internals.HiddenStateWorker"

    def __init__(self, context: StageContext, config: Any, layers: Sequence[int], end_tokens: Sequence[int]) -> None:
        """Load the thinker.

        config: of the whole model. layers: the layers whose hidden states are captured. end_tokens: tokens that end an
        answer, besides those of the checkpoint's generation config.

        Raises as ``VLLMEngine`` and ``OmniProcessor`` do.
        """
        super().__init__(
            context,
            worker_cls=self.WORKER,
            additional_config={"row_layers": list(layers)},
            enable_prefix_caching=False,
            async_scheduling=False,
            speculative_config=None,  # a rejected draft's hidden states would pass for those of the answer
            mm_processor_cache_gb=0,  # useless, since no item's name is used twice (see ``media``)
        )
        context.report("reading the processor")
        self._config = config
        self._open_processors(context, self._context, self._options.system_prompt)
        ends = self._llm.model_config.try_get_generation_config().get("eos_token_id") or ()
        ends = [ends] if isinstance(ends, int) else ends
        self._vocabulary = Vocabulary(self._processor.tokenizer, [*end_tokens, *ends])
        self._capabilities |= {
            "reset_mm_cache": "the engine keeps no processed media: its mm_processor_cache_gb is 0",
            "reset_encoder_cache": "the engine empties it when no request runs, and finds no item in it twice",
        }
        self._capabilities |= tokenizing.capabilities(self._vocabulary, self._context, self._conversation_tokens)

    # for the families, besides ``_new_request``, ``_handoff_header`` and ``_talker_positions``

    def _prompt_rows(self, request: R, states: HiddenStates) -> Tensor:
        """Return the talker's rows, (k, hidden), of k prompt positions."""
        raise NotImplementedError

    def _answer_row(self, states: HiddenStates) -> Tensor | None:
        """Return the talker's row, (1, hidden), of a computed token, if the row needs the forward."""
        return None

    def _token_row(self, token: int) -> Tensor | None:
        """Return the talker's row, (1, hidden), of a generated token, if the row needs no forward."""
        return None

    # VLLMEngine

    def _prepare(self, request: R, inputs: OmniInputs) -> Any:
        """Return vLLM's ``EngineInput``."""
        request.prompt_tokens = len(inputs.ids)
        if not inputs.is_embedded:
            return to_prompt(inputs, self._config.thinker_config)
        return self._embeds_input(request.collector.raw, request.sampling.repetition_penalty)

    def _join_batch(self, request: R, prompt: Any) -> None:
        limit = min(request.params.max_tokens, self._context - request.prompt_tokens)
        request.answer = AnswerText(self._vocabulary, request.prompt_tokens, limit, request.params)
        request.sampling.stop_token_ids = sorted(self._vocabulary.end_tokens(request.params))
        request.sampling.stop, request.sampling.detokenize = [], False
        super()._join_batch(request, prompt)

    def _free_ended(self) -> None:
        super()._free_ended()
        if not self._llm.has_unfinished_requests():
            self._llm.reset_encoder_cache()  # vLLM keeps encoded items by name, and no name is used twice

    @torch.inference_mode()
    def _prompt_outputs(self) -> Iterator[StageOutput]:
        by_id = {request.internal_id: request for request in self._requests.values()}
        for states in self._llm.collective_rpc("take_hidden_states")[0]:
            request = by_id.get(states.request)
            if request is not None and request.handoff is not None:
                yield from self._hand_over(request, request.handoff, states)

    def _hand_over(self, request: R, handoff: TalkerHandoff, states: HiddenStates) -> Iterator[StageOutput]:
        """Add the rows of positions that were not computed before, and yield what can go with them."""
        new = states.since(request.computed)
        prompt = new.until(handoff.size)
        request.computed += len(prompt)
        if len(prompt):
            handoff.add_prompt(self._prompt_rows(request, prompt))
        yield from self._chunks(request, handoff)
        yield from self._put_out(request, request.computed - handoff.size)
        for _ in range(len(new) - len(prompt)):
            one = new.since(request.computed).until(request.computed + 1)
            request.computed += 1
            if (row := self._answer_row(one)) is not None:
                handoff.add_token(row)
            yield from self._put_out(request, request.computed - handoff.size)

    def _outputs_behind(self, request: R, outputs: Sequence[Any]) -> Iterator[StageOutput]:
        if request.handoff is None:
            yield from self._put_out(request, sum(len(entry.tokens) for entry in request.behind))

    def _put_out(self, request: R, computed: int) -> Iterator[StageOutput]:
        """Put outputs out again. computed: the answer's positions whose rows are there; negative: in the prompt."""
        while request.behind:
            entry = request.behind[0]
            if request.answer.tokens + len(entry.tokens) - 1 > computed:
                break
            request.behind.popleft()
            made = self._answer(request, entry.tokens, dict(entry.logprobs or {}))
            decisions, partial = request.declare(entry), entry.logprobs is None
            yield msgspec.structs.replace(made, decisions=decisions, partial=partial)

    def _chunks(self, request: R, handoff: TalkerHandoff) -> Iterator[StageOutput]:
        while handoff.waiting >= CHUNK and handoff.taken + CHUNK < handoff.size:
            if downstream := handoff.take(lambda: self._handoff_header(request), prompt=CHUNK):
                yield StageOutput(request.id, downstream=downstream)

    @torch.inference_mode()
    def _outputs(self, request: R, output: Any) -> Iterator[StageOutput]:
        (answer,) = output.outputs
        request.decide(answer.token_ids)
        reason = answer.finish_reason if output.finished else None
        made = self._answer(request, answer.token_ids, dict(request.logprobs_of(output)), reason)
        if made.data or made.downstream or request.is_due:
            yield msgspec.structs.replace(made, decisions=request.decisions(made.data))

    def _answer(
        self, request: R, new: Sequence[int], data: dict[str, Any], finish_reason: str | None = None
    ) -> StageOutput:
        """Add tokens to the answer; return what there is to put out, without decisions.

        data: what the output has besides the text. finish_reason: vLLM's, if it has ended the answer.
        """
        tokens, text = list[int](), ""
        for token in new:  # several, with ``stream_interval``
            tokens.append(token)
            data |= request.answer.push(token)
            text += data.pop("text", "")
            if request.answer.finish_reason is not None:
                break
        if "logprobs" in data:
            data["logprobs"] = data["logprobs"][: len(tokens)]
        request.completion_tokens += len(tokens)
        last = finish_reason is not None or request.answer.finish_reason is not None
        if text or last:
            data["text"] = text
        if finish_reason is not None and request.answer.finish_reason is None:  # vLLM ended it for a reason of its own
            data["finish_reason"] = finish_reason
            data |= {"prompt_tokens": request.prompt_tokens, "completion_tokens": request.completion_tokens}
        downstream = {}
        if (handoff := request.handoff) is not None:
            for token in tokens[: len(tokens) - last]:
                if (row := self._token_row(token)) is not None:
                    handoff.add_token(row)
            downstream = handoff.take(lambda: self._handoff_header(request), request.answer.certain_tokens)
        if last:
            if finish_reason is None:
                self._llm.abort_request([str(request.id)])
            self._forget(request)
        return StageOutput(request.id, data=data, downstream=downstream, last=last)

    def _embed(self, ids: Any) -> Tensor:
        """Return rows of the model's embedding table, (n, hidden)."""
        rows: Tensor = self._llm.collective_rpc("embed", args=(torch.as_tensor(ids, dtype=torch.int64),))[0]
        return rows
