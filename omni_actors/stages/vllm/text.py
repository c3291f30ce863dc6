"""Text to text on vLLM: a conversation becomes the model's prompt as in the ``llm`` engine."""

from __future__ import annotations

import math
from typing import Any

from omni_actors.stages.autoregressive.language import refuse_beyond_context
from omni_actors.stages.base import StageContext, StageRequest
from omni_actors.stages.llm.prompt import Prompt
from omni_actors.stages.vllm.engine import Request, VLLMEngine
from vllm.inputs.engine import TokensInput, tokens_input

__all__ = ["TextEngine"]


class _Request(Request):
    collector: Prompt


class TextEngine(VLLMEngine[_Request]):
    """See the module."""

    def __init__(self, context: StageContext) -> None:
        """Raises as ``VLLMEngine`` does, and ValueError where the checkpoint has no chat template."""
        super().__init__(context)
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
