"""Text to text on vLLM: the ``llm`` engine's prompts, vLLM's detokenization.

Embeddings (``raw_prompt``) need ``engine_args: {enable_prompt_embeds: true}``.

Outputs: ``{"text": piece}``, and at the end ``{"text": rest, "finish_reason": …, "prompt_tokens": n,
"completion_tokens": n}``. With ``detokenize: false``, ``token_ids`` takes the place of ``text``. With several answers
(``n``), each piece has its answer's ``index``, and each answer's last piece its ``finish_reason``. vLLM drops an
incomplete character at the end of an answer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from vllm.inputs.engine import tokens_input

from omni_actors.stages.autoregressive import tokenizing
from omni_actors.stages.autoregressive.prompt_engine import C
from omni_actors.stages.autoregressive.text import Vocabulary
from omni_actors.stages.base import MOST_UNDECLARED, StageContext, StageOutput, StageRequest
from omni_actors.stages.llm.chat_template import check_chat_template
from omni_actors.stages.llm.prompt import Prompt, conversation_tokens
from omni_actors.stages.refusal import request_work, validated
from omni_actors.stages.vllm.decided import Entry
from omni_actors.stages.vllm.engine import VLLMEngine, VLLMRequest
from omni_actors.stages.vllm.options import VLLMParams, VLLMSplitOptions


class TextRequest(VLLMRequest[C]):
    """One request. ``running``: answers that have not ended."""

    def __init__(self, request: StageRequest, params: VLLMParams, collector: C) -> None:
        super().__init__(request, params, collector)
        self.running = params.n
        self.undeclared: defaultdict[int, list[int]] = defaultdict(list)
        """The tokens of each answer that no output has declared yet."""


class TextEngine(VLLMEngine[TextRequest[Any]]):
    """Answers a conversation, or continues a raw prompt, with text."""

    OPTIONS = VLLMSplitOptions

    def __init__(self, context: StageContext, **fixed: Any) -> None:
        """Raises as ``VLLMEngine`` does, and ValueError if the tokenizer has no chat template that can be used."""
        super().__init__(context, **{"worker_cls": "omni_actors.stages.vllm._internals.StageWorker", **fixed})
        tokenizer: Any = self._llm.get_tokenizer()
        check_chat_template(tokenizer, context.tokenizer_directory)
        self._vocabulary = Vocabulary(tokenizer, None, self._llm.model_config.get_vocab_size())
        conversation = partial(conversation_tokens, tokenizer, self._options.system_prompt)
        self._capabilities |= tokenizing.capabilities(self._vocabulary, self._context, conversation)

    def _new_request(self, request: StageRequest) -> TextRequest[Any]:
        return TextRequest(request, validated(request.params, VLLMParams), Prompt(request.sources))

    def _encode(self, request: TextRequest[Any]) -> Any:
        if not request.collector.raw.is_embedded:
            ids = request.collector.encode(
                self._vocabulary,
                self._options.system_prompt,
                self._context,
                tools=request.params.tools,
                template_kwargs=request.params.chat_template_kwargs,
                kwargs=request.params.tokenization_kwargs,
            )
            request.prompt_tokens = len(ids)
            return tokens_input(ids)
        raw, penalty = request.collector.raw, request.sampling.repetition_penalty
        request.prompt_tokens = raw.least_tokens(1)
        with request_work("embeds"):
            return self._embeds_input(raw, penalty)

    def _outputs_behind(self, request: TextRequest[Any], outputs: Sequence[Any]) -> Iterator[StageOutput]:
        for output in outputs:
            entry = request.behind.popleft()
            yield self._output(request, entry, self._data(request, output.outputs[0], entry.logprobs or {}))

    def _outputs(self, request: TextRequest[Any], output: Any) -> Iterator[StageOutput]:
        (answer,) = output.outputs
        undeclared = request.undeclared[answer.index]
        undeclared += answer.token_ids
        logprobs = request.logprobs_of(output)
        data = self._data(request, answer, logprobs)
        if data or len(undeclared) >= MOST_UNDECLARED:
            yield self._output(request, Entry(answer.index, tuple(undeclared), logprobs), data)
            undeclared.clear()

    def _data(self, request: TextRequest[Any], answer: Any, logprobs: Mapping[str, Any]) -> dict[str, Any]:
        """Count the tokens of an answer; return the data of the output, empty if the next one is to have them."""
        request.completion_tokens += len(answer.token_ids)
        ends = answer.finish_reason is not None
        request.running -= ends
        data = dict(logprobs)
        if not request.sampling.detokenize:
            data["token_ids"] = list(answer.token_ids)
        elif answer.text or not request.running:
            data["text"] = answer.text
        if ends:
            data["finish_reason"] = answer.finish_reason
        if not request.running:
            data |= {"prompt_tokens": request.prompt_tokens, "completion_tokens": request.completion_tokens}
        if request.sampling.n > 1 and data:
            data["index"] = answer.index
        return data

    def _output(self, request: TextRequest[Any], entry: Entry, data: dict[str, Any]) -> StageOutput:
        if last := not request.running:
            self._forget(request)
        decisions, partial = request.declare(entry), entry.logprobs is None
        return StageOutput(request.id, data=data, last=last, decisions=decisions, partial=partial)
