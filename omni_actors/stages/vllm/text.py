"""Text to text on vLLM: the ``llm`` engine's prompts, vLLM's detokenization.

With ``engine_args: {enable_prompt_embeds: true}`` a client may send embeddings in place of a conversation: all chunks'
tensors ``embeds``, floating point (n, hidden), one after the other, are the whole prompt.

Outputs: ``{"text": piece}``, and at the end ``{"text": rest, "finish_reason": …, "prompt_tokens": n,
"completion_tokens": n}``. With ``detokenize: false``, ``token_ids`` takes the place of ``text``. With several answers
(``n``), each piece has its answer's ``index``, and each answer's last piece its ``finish_reason``. vLLM drops an
incomplete character at the end of an answer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from vllm.inputs.engine import embeds_input, tokens_input

from omni_actors.stages.autoregressive.text import Vocabulary
from omni_actors.stages.base import Chunk, InvalidRequest, StageContext, StageOutput, StageRequest
from omni_actors.stages.llm.prompt import Prompt
from omni_actors.stages.refusal import request_work, validated
from omni_actors.stages.tensors import to_torch
from omni_actors.stages.vllm.engine import VLLMEngine, VLLMRequest, logprobs_of
from omni_actors.stages.vllm.options import VLLMParams


class _Prompt(Prompt):
    """A conversation, or embeddings."""

    def __init__(self, sources: Sequence[str]) -> None:
        super().__init__(sources)
        self.embeds: list[Tensor] = []
        """(n, hidden) each."""

    def feed(self, chunk: Chunk) -> bool:
        if (sent := chunk.tensors.get("embeds")) is not None:
            embeds = to_torch(sent)
            if not embeds.is_floating_point() or embeds.ndim != 2 or not len(embeds) or not embeds.isfinite().all():
                message = f"embeds: finite floating point (n, hidden) was expected, not {sent.dtype} {sent.shape}"
                raise InvalidRequest(message, param="embeds")
            self.embeds.append(embeds)
        return super().feed(chunk)


class TextEngine(VLLMEngine[VLLMRequest[_Prompt]]):
    """Answers a conversation, or continues a prompt of embeddings, with text."""

    def __init__(self, context: StageContext) -> None:
        """Raises as ``VLLMEngine`` does, and ValueError if the checkpoint has no chat template."""
        super().__init__(context, worker_cls="omni_actors.stages.vllm._internals.StageWorker")
        tokenizer: Any = self._llm.get_tokenizer()
        if tokenizer.chat_template is None:
            raise ValueError(f"{context.model}: no chat template; this engine serves conversations only")
        self._vocabulary = Vocabulary(tokenizer, None)

    def _new_request(self, request: StageRequest) -> VLLMRequest[_Prompt]:
        return VLLMRequest(request, validated(request.params, VLLMParams), _Prompt(request.sources))

    def _encode(self, request: VLLMRequest[_Prompt]) -> Any:
        if not request.collector.embeds:
            ids = request.collector.encode(self._vocabulary, self._options.system_prompt, self._context)
            request.prompt_tokens = len(ids)
            return tokens_input(ids)
        if request.sampling.repetition_penalty != 1.0:  # vLLM would count ids that an earlier request left in the row
            message = "a repetition penalty counts the prompt's tokens, and embeds have none"
            raise InvalidRequest(message, param="repetition_penalty")
        with request_work("embeds"):
            embeds = self._embeds(request.collector)
        request.prompt_tokens = len(embeds)
        return embeds_input(embeds)

    def _embeds(self, prompt: _Prompt) -> Tensor:
        """Check the embeddings, (n, hidden). vLLM does not check them: wrong ones would end the worker."""
        model = self._llm.model_config
        if not model.enable_prompt_embeds:
            message = "embeds are taken only by a stage with engine_args.enable_prompt_embeds: true"
            raise InvalidRequest(message, param="embeds")
        if prompt.messages:
            raise InvalidRequest("embeds are a whole prompt: no messages come with them", param="embeds")
        hidden = model.get_hidden_size()
        if found := [each.shape[1] for each in prompt.embeds if each.shape[1] != hidden]:
            raise InvalidRequest(f"embeds: rows of {found[0]} numbers; the model takes {hidden}", param="embeds")
        return torch.cat(prompt.embeds).to(model.dtype)

    def _outputs(self, request: VLLMRequest[_Prompt], output: Any) -> Iterator[StageOutput]:
        several = request.sampling.n > 1
        if output.finished:
            del self._requests[request.id]
        for at, answer in enumerate(output.outputs):
            last = output.finished and at == len(output.outputs) - 1
            request.completion_tokens += len(answer.token_ids)
            request.decide(answer.token_ids)
            data = logprobs_of(output, answer)
            if not request.sampling.detokenize:
                data["token_ids"] = list(answer.token_ids)
            elif answer.text or last:
                data["text"] = answer.text
            if answer.finish_reason is not None and (several or last):
                data["finish_reason"] = answer.finish_reason
            if last:
                data |= {"prompt_tokens": request.prompt_tokens, "completion_tokens": request.completion_tokens}
            if several and data:
                data["index"] = answer.index
            if data:
                yield StageOutput(request.id, data=data, last=last, decisions=request.decisions())
