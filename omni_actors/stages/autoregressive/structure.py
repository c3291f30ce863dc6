"""Structured output: which tokens an answer may go on with, so that it has the form that its request asks for.

Rules
1. A request's ``structured_outputs`` has one of ``json`` (a JSON schema), ``json_object`` (true), ``regex``, ``choice``
   (a list of texts) and ``grammar`` (in Lark's format), as vLLM's has.
2. JSON has no white space that its meaning does not need: small models would go on with it.
3. The state depends on the answer's tokens alone, so a resumed request has it back when the tokens are counted again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import llguidance
import llguidance.hf
import numpy as np
import torch
from llguidance import LLMatcher
from torch import Tensor

from omni_actors.stages.base import InvalidRequest

PARAM = "structured_outputs"
_LONGEST_REASON = 300


def _schema(given: Any) -> str:
    if isinstance(given, str):
        given = json.loads(given)
    options: Any = {"whitespace_flexible": False, "coerce_one_of": True}
    return LLMatcher.grammar_from_json_schema(given, defaults=options)


def _choice(given: Any) -> str:
    if not (isinstance(given, list) and given and all(isinstance(text, str) and text for text in given)):
        raise ValueError("a list of texts was expected")
    return LLMatcher.grammar_from_lark("start: " + " | ".join(json.dumps(text) for text in given))


def _object(given: Any) -> str:
    if given is not True:
        raise ValueError("only true is accepted")
    return _schema({"type": "object"})


_GRAMMARS: dict[str, Callable[[Any], str]] = {
    "json": _schema,
    "json_object": _object,
    "regex": LLMatcher.grammar_from_regex,
    "choice": _choice,
    "grammar": LLMatcher.grammar_from_lark,
}


class StructureTokenizer:
    """A tokenizer in the form in which structures use it. Making one takes up to a second for a large vocabulary."""

    def __init__(self, tokenizer: Any, end_tokens: list[int]) -> None:
        self.inner = llguidance.hf.from_tokenizer(tokenizer, eos_token=end_tokens)


class Structure:
    """The structure of one answer, as far as its tokens have it.

    settings: ``structured_outputs`` of the request. Raises InvalidRequest.
    """

    def __init__(self, tokenizer: StructureTokenizer, settings: Mapping[str, Any]) -> None:
        given = {name: value for name, value in settings.items() if value is not None}
        if len(given) != 1 or not given.keys() <= _GRAMMARS.keys():
            message = f"{PARAM}: expected one of {', '.join(_GRAMMARS)}; found {', '.join(sorted(given)) or 'nothing'}"
            raise InvalidRequest(message, param=PARAM)
        [(kind, value)] = given.items()
        try:
            self._matcher = LLMatcher(tokenizer.inner, _GRAMMARS[kind](value), log_level=0)
        except (TypeError, ValueError) as error:
            raise _refusal(kind, str(error)) from error
        if self._matcher.is_error():
            raise _refusal(kind, self._matcher.get_error())

    def mask(self, logits: Tensor) -> Tensor:
        """Return the logits (vocabulary,) with those of tokens that cannot follow at -inf."""
        bits = np.unpackbits(np.frombuffer(self._matcher.compute_bitmask(), np.uint8), bitorder="little")
        allowed = torch.zeros(len(logits), dtype=torch.bool)
        allowed[: len(bits)] = torch.from_numpy(bits[: len(logits)]).bool()
        return logits.masked_fill(~allowed, float("-inf"))

    def accept(self, token: int) -> None:
        """Count a token of the answer."""
        self._matcher.consume_token(token)


def _refusal(kind: str, reason: str) -> InvalidRequest:
    return InvalidRequest(f"{PARAM}: this {kind} cannot be used: {reason[:_LONGEST_REASON]}", param=PARAM)
