"""Text to text on vLLM: a conversation becomes the model's prompt as in the ``llm`` engine; vLLM detokenizes.

Outputs: ``{"text": piece}``, and at the end ``{"text": rest, "finish_reason": …, "prompt_tokens": n,
"completion_tokens": n}``. Without detokenizing, ``token_ids`` stand in place of ``text``. Of several answers each
piece has its ``index``, and its ``finish_reason`` at its end. Half a character at the end of an answer is not given.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from omni_actors.stages.autoregressive.language import refuse_beyond_context
from omni_actors.stages.base import StageContext, StageOutput, StageRequest
from omni_actors.stages.llm.prompt import Prompt
from omni_actors.stages.vllm.engine import Request, VLLMEngine, logprobs_of
from vllm.inputs.engine import TokensInput, tokens_input

__all__ = ["TextEngine"]


class _Request(Request):
    collector: Prompt


class TextEngine(VLLMEngine[_Request]):
    """See the module."""

    def __init__(self, context: StageContext) -> None:
        """Raises as ``VLLMEngine`` does, and ValueError where the checkpoint has no chat template."""
        super().__init__(context, worker_cls="omni_actors.stages.vllm.private.SeededWorker")
        self._tokenizer: Any = self._llm.get_tokenizer()
        if self._tokenizer.chat_template is None:
            raise ValueError(f"{context.model}: no chat template; this engine serves conversations only")
        self._longest = max(map(len, self._tokenizer.get_vocab()))
        """Characters of the longest token."""

    def _open(self, request: StageRequest, params: Any) -> _Request:
        return _Request(request, params, Prompt(request.sources))

    def _prompt(self, request: _Request) -> TokensInput:
        text = request.collector.render(self._tokenizer, self._options.system_prompt)
        # Tokenizing takes a time that grows with the text, in which all the other requests wait.
        least = math.ceil(len(text) / self._longest)
        refuse_beyond_context(least, f"{len(text)} characters, which are {least} tokens at least,", self._context)
        return tokens_input(self._tokenizer.encode(text, add_special_tokens=False))

    def _outputs(self, request: _Request, output: Any) -> Iterator[StageOutput]:
        several = request.sampling.n > 1
        if output.finished:
            del self._requests[request.id]
        for at, answer in enumerate(output.outputs):
            last = output.finished and at == len(output.outputs) - 1
            request.tokens += len(answer.token_ids)
            data = logprobs_of(output, answer)
            if not request.sampling.detokenize:
                data["token_ids"] = list(answer.token_ids)
            elif answer.text or last:
                data["text"] = answer.text
            if answer.finish_reason is not None and (several or last):
                data["finish_reason"] = answer.finish_reason
            if last:
                data |= {"prompt_tokens": request.prompt_tokens, "completion_tokens": request.tokens}
            if several and data:
                data["index"] = answer.index
            if data:
                yield StageOutput(request.id, data=data, last=last)
