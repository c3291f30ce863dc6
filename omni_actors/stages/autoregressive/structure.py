"""Structured output: which tokens an answer may go on with, so that it has the form that its request asks for.

Rules
1. A request's ``structured_outputs`` has one of ``json`` (a JSON schema), ``json_object`` (true), ``regex``, ``choice``
   (a list of texts) and ``grammar`` (in Lark's format), as vLLM's has.
2. JSON has no white space that its meaning does not need: small models would go on with it.
3. The state depends on the answer's tokens alone, so a resumed request has it back when the tokens are counted again.
4. A structure may fail while the answer goes on: a grammar may lead to where nothing can follow, or be so ambiguous
   that it exceeds a bound. From then on it excludes every token, and ``failure`` says why. Its request ends with that.
"""

from __future__ import annotations

import json
import math
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from decimal import Decimal
from typing import Any

import llguidance
import llguidance.hf
import numpy as np
import torch
from llguidance import LLMatcher, LLParserLimits
from torch import Tensor

from omni_actors.stages.base import InvalidRequest

PARAM = "structured_outputs"
_LONGEST_REASON = 300
_STACK_BYTES = 256 << 20
"""The stack on which a structure is compiled: llguidance recurses over the objects of a schema and over rules that name
each other. The longest chain that a request's parameters have room for takes less than 32 MB. Only what is used takes
memory."""
_MOST_LINES = 500
"""Lines of a grammar. Each rule has its own; to report an error at the end of a chain of n rules, llguidance takes time
in proportion to n squared: 1 s for 500."""
_LIMITS = {
    "json": LLParserLimits(initial_lexer_fuel=100_000),
    "regex": LLParserLimits(initial_lexer_fuel=60_000),
    "grammar": LLParserLimits(initial_lexer_fuel=60_000, max_items_in_row=300),
}
"""What a client's structure may cost the batch, which waits for it. initial_lexer_fuel: compiling a regular expression
takes time in proportion to the square of its size: 1 s at 60,000. A schema of 450 properties with patterns takes less.
max_items_in_row: an ambiguous grammar has ever more items, and each token takes time in proportion to their square.
Only a client's own grammar can be so ambiguous. A schema may have as many as llguidance allows: each optional property
takes 4 of them.
None of these bounds ``multipleOf`` (see ``_MOST_REMAINDERS``)."""
_MOST_REMAINDERS = 20_000
"""The remainders of the numbers of ``multipleOf`` in a structure. llguidance makes a state for each of them when it
compiles the structure: 0.1 s and 10 MB for 20,000, 8 s and 500 MB for 400,000. Where schemas are joined, the least
common multiple counts."""
_JOINS = {
    *("allOf", "anyOf", "oneOf", "not", "if", "$ref", "$dynamicRef", "$recursiveRef"),
    *("patternProperties", "dependencies", "dependentSchemas"),
}
"""The keys by which a schema joins others."""
_JSON = json.JSONDecoder(parse_int=float)
_IN_GRAMMAR = re.compile(r"%json[ \t\r\n]*")
"""What a JSON schema in a grammar follows."""
_OVERRIDES = "x-guidance"
"""The key of a schema by which llguidance lets it change the server's options."""


_UNFORCED = '%llguidance {"no_forcing": true}\n'
"""At the beginning of a grammar: the model chooses the tokens of text that has no alternative. By default llguidance
demands the tokenizer's own tokens. For the text of a control token that is the control token, which is not text."""


def _schema(given: Any) -> str:
    if isinstance(given, str):
        given = json.loads(given)
    if isinstance(given, dict):
        given = {name: value for name, value in given.items() if name != _OVERRIDES}
    _check_remainders(given)
    options: Any = {"whitespace_flexible": False, "coerce_one_of": True}
    return LLMatcher.grammar_from_json_schema(given, defaults=options)


def _choice(given: Any) -> str:
    if not (isinstance(given, list) and given and all(isinstance(text, str) and text for text in given)):
        raise ValueError("a list of texts was expected")
    return LLMatcher.grammar_from_lark("start: TEXT\nTEXT: " + " | ".join(json.dumps(text) for text in given))


def _object(given: Any) -> str:
    if given is not True:
        raise ValueError("only true is accepted")
    return _schema({"type": "object"})


def _grammar(given: Any) -> str:
    if isinstance(given, str) and given.count("\n") >= _MOST_LINES:
        raise ValueError(f"it has more than {_MOST_LINES} lines")
    if isinstance(given, str):
        if given.lstrip().startswith("{"):
            # llguidance would read it in a format of its own, in which texts of any format are JSON strings.
            raise ValueError("Lark's format was expected")
        _check_remainders(*_schemas(given), are_joined=True)
    return LLMatcher.grammar_from_lark(given)


def _schemas(grammar: str) -> Iterator[Any]:
    """Return the JSON schemas in a grammar, but those that are not JSON, which llguidance refuses."""
    for found in _IN_GRAMMAR.finditer(grammar):
        try:
            yield _JSON.raw_decode(grammar, found.end())[0]
        except (ValueError, RecursionError):
            continue


def _check_remainders(*schemas: Any, are_joined: bool = False) -> None:
    """Raise ValueError if the numbers of ``multipleOf`` in some schemas have too many remainders.

    are_joined: whether the schemas may be joined, or parts of them where they do not show it.
    """
    found: set[int] = set()
    rest = [*schemas]
    while rest:
        each = rest.pop()
        if isinstance(each, dict):
            are_joined = are_joined or not _JOINS.isdisjoint(each)
            found.add(_remainders(each.get("multipleOf")))
            rest += each.values()
        elif isinstance(each, list):
            rest += each
    if sum(found) > _MOST_REMAINDERS or (are_joined and math.lcm(*found - {0}) > _MOST_REMAINDERS):
        message = f"their sum or their least common multiple, without decimal points, is more than {_MOST_REMAINDERS}"
        raise ValueError(f"the numbers of multipleOf are too large: {message}")


def _remainders(number: Any) -> int:
    """Return how many remainders a number of ``multipleOf`` has: its digits without the point, so 25 for 0.25.

    What is not a number has 0.
    """
    if isinstance(number, bool) or not isinstance(number, (int, float)):
        return 0
    _, digits, exponent = Decimal(repr(number)).normalize().as_tuple()
    if not isinstance(exponent, int):  # infinite, or not a number
        return 0
    remainders: int = int("".join(map(str, digits))) * 10 ** max(exponent, 0)
    return remainders


_GRAMMARS: dict[str, Callable[[Any], str]] = {
    "json": _schema,
    "json_object": _object,
    "regex": LLMatcher.grammar_from_regex,
    "choice": _choice,
    "grammar": _grammar,
}


class StructureTokenizer:
    """A tokenizer in the form in which structures use it. Making one takes up to a second for a large vocabulary."""

    def __init__(self, tokenizer: Any, end_tokens: list[int]) -> None:
        self.inner = llguidance.hf.from_tokenizer(tokenizer, eos_token=end_tokens)
        self._tokenizer = tokenizer

    @property
    def added_texts(self) -> list[str]:
        """The texts for which the tokenizer has a token of its own, control tokens among them."""
        return [str(token) for token in self._tokenizer.added_tokens_decoder.values()]


class Structure:
    """The structure of one answer, as far as its tokens have it.

    settings: ``structured_outputs`` of the request. Raises InvalidRequest.
    """

    def __init__(self, tokenizer: StructureTokenizer, settings: Mapping[str, Any]) -> None:
        given = {name: value for name, value in settings.items() if value is not None}
        if len(given) != 1 or not given.keys() <= _GRAMMARS.keys():
            message = f"{PARAM}: expected one of {', '.join(_GRAMMARS)}; found {', '.join(sorted(given)) or 'nothing'}"
            raise InvalidRequest(message, param=PARAM)
        [(self._kind, value)] = given.items()
        try:
            self._matcher = _compiled(tokenizer, self._kind, value)
        except (TypeError, ValueError, RecursionError) as error:
            raise _refusal(self._kind, str(error)) from error
        if self.failure is None:
            self._matcher.compute_bitmask()  # there may be no first token
        if (failure := self.failure) is not None:
            raise failure

    @property
    def failure(self) -> InvalidRequest | None:
        """Why the answer cannot have this structure; None while it can."""
        return _refusal(self._kind, self._matcher.get_error()) if self._matcher.is_error() else None

    def mask(self, logits: Tensor) -> Tensor:
        """Return the logits (vocabulary,) with those of tokens that cannot follow at -inf: all, once it has failed."""
        bits = np.unpackbits(np.frombuffer(self._matcher.compute_bitmask(), np.uint8), bitorder="little")
        if self._matcher.is_error():
            return torch.full_like(logits, float("-inf"))
        excluded = torch.ones(len(logits), dtype=torch.bool)
        excluded[: len(bits)] = ~torch.from_numpy(bits[: len(logits)]).bool()
        return logits.masked_fill(excluded.to(logits.device), float("-inf"))

    def accept(self, token: int) -> None:
        """Count a token of the answer."""
        self._matcher.consume_token(token)


def _compiled(tokenizer: StructureTokenizer, kind: str, value: Any) -> LLMatcher:
    """Return the matcher of a structure. Raises TypeError, ValueError, RecursionError."""

    def compile_grammar() -> LLMatcher:
        grammar = _GRAMMARS[kind](value)
        if kind == "choice":
            texts = "\n".join(value)
            if any(added in texts for added in tokenizer.added_texts):
                grammar = _UNFORCED + grammar
        return LLMatcher(tokenizer.inner, grammar, log_level=0, limits=_LIMITS.get(kind))

    with ThreadPoolExecutor(1) as executor:
        usual = threading.stack_size(_STACK_BYTES)
        try:
            compiling: Future[LLMatcher] = executor.submit(compile_grammar)  # it starts the thread
        finally:
            threading.stack_size(usual)
        return compiling.result()


def _refusal(kind: str, reason: str) -> InvalidRequest:
    reason = reason.partition("\n<state>")[0][:_LONGEST_REASON]
    return InvalidRequest(f"{PARAM}: this {kind} cannot be used: {reason}", param=PARAM)
