"""Lets vLLM go on with answers whose first tokens an earlier incarnation has decided: which tokens, and how.

vLLM has no request that begins in the middle of an answer, but it preempts requests and later computes them again: the
prompt and all tokens of the answer, in one prefill. So a resumed answer gets its tokens as if it had been preempted
(``replay``, ``_internals.StageWorker``). All that follows from them comes out as if nothing had happened, because vLLM
restores it after every preemption: penalties, ``min_tokens``, bad words, custom logits processors, and counts. Random
numbers go on where they were. vLLM's own functions find the end of the answer, stop strings and a structure's state.

A prefill has no log probabilities. So they are in the journal, beside the tokens (``Entry``).

What vLLM cannot restore it computes again, one step per token: a logits processor leaves one possible token at each
position that is decided (``DecidedTokens``). ``at_once`` says which tokens these are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from typing import Any, NamedTuple

import torch
from torch import Tensor
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor, RequestLogitsProcessor

from omni_actors.stages.base import MOST_DECISIONS, Decisions, StageRequest
from omni_actors.stages.vllm import logprobs

MOST_LOGPROBS = 50_000
"""How many numbers the log probabilities of one request may have in its journal: a journal travels in control messages,
and is kept in memory."""
_DECIDED = "omni_actors.decided"
_AT_ONCE = "omni_actors.at_once"
_RESERVED = frozenset({_DECIDED, _AT_ONCE, "kv_transfer_params", "ec_transfer_params"})
"""The ``extra_args`` that no client sets: ours, and those by which vLLM moves blocks and encoded media."""


class Entry(NamedTuple):
    """What one output has decided.

    In a journal it is the tokens; with several answers (``n``), after the answer. With log probabilities, of the answer
    or the prompt, it is also the number of tokens before them, and the log probabilities behind them if they fit.
    """

    answer: int
    """The answer's index, 0 if there is only one."""
    tokens: Decisions
    logprobs: Mapping[str, Any] | None
    """The output's log probabilities, of all its data; None: they did not fit into the journal."""

    def decisions(self, sampling: SamplingParams, room: int) -> Decisions:
        """Return it as an entry of the journal of a request with these parameters.

        room: for how many more numbers of log probabilities the journal has room.
        """
        answer = () if sampling.n == 1 else (self.answer,)
        if not logprobs.of_any(sampling):
            return (*answer, *self.tokens)
        short = (*answer, len(self.tokens), *self.tokens)
        if self.logprobs is None:
            return short
        numbers = logprobs.to_numbers(self.logprobs)
        return (*short, *numbers) if len(numbers) <= min(room, MOST_DECISIONS - len(short)) else short


def entries(journal: Sequence[Decisions], sampling: SamplingParams) -> list[Entry]:
    """Return the entries of the journal of a request with these parameters."""
    return [_entry(decisions, sampling) for decisions in journal]


def _entry(decisions: Decisions, sampling: SamplingParams) -> Entry:
    if not decisions:  # of an output that brings no token
        return Entry(0, (), {})
    answer, rest = (0, decisions) if sampling.n == 1 else (decisions[0], decisions[1:])
    if not logprobs.of_any(sampling):
        return Entry(answer, rest, {})
    end = 1 + rest[0]
    return Entry(answer, rest[1:end], logprobs.from_numbers(rest[end:]) if rest[end:] else None)


def at_once(journal: Sequence[Entry], request: StageRequest, sampling: SamplingParams) -> int:
    """Return of how many outputs of the journal, from the first one on, vLLM can compute the tokens in one prefill.

    None of an answer with a budget for thinking: how vLLM counts after a preemption is not tested here. Otherwise those
    before the first needed one whose log probabilities the journal does not have: a prefill has none.
    """
    if sampling.thinking_token_budget is not None:
        return 0
    needed = range(request.needed_from, len(journal))
    return next((number for number in needed if journal[number].logprobs is None), len(journal))


def drop_reserved(sampling: SamplingParams) -> None:
    """Drop what a client must not set."""
    sampling.extra_args = {k: v for k, v in (sampling.extra_args or {}).items() if k not in _RESERVED} or None


def begin_with(sampling: SamplingParams, tokens: Sequence[int], at_once: int) -> SamplingParams:
    """Return the parameters of an answer that begins with these tokens.

    at_once: how many of them vLLM computes in one prefill. The log probabilities of the prompt were in the first
    output, so vLLM does not compute them again if that is among these.
    """
    made = copy(sampling)
    made.extra_args = {**(sampling.extra_args or {}), _DECIDED: list(tokens), _AT_ONCE: at_once}
    if at_once:
        made.prompt_logprobs = made.prompt_logprob_start = made.prompt_logprob_token_ids = None
    return made


def tokens_at_once(sampling: SamplingParams | None) -> list[int]:
    """Return the tokens that vLLM computes in one prefill."""
    extra = (sampling.extra_args if sampling is not None else None) or {}
    tokens: list[int] = extra.get(_DECIDED, [])[: extra.get(_AT_ONCE, 0)]
    return tokens


class DecidedTokens(AdapterLogitsProcessor):  # type: ignore[misc]  # vLLM has no types where it is not installed
    """A logits processor of vLLM. See the module."""

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> RequestLogitsProcessor | None:
        decided: list[int] = (params.extra_args or {}).get(_DECIDED, [])

        def only_decided(output: list[int], logits: Tensor) -> Tensor:
            if len(output) >= len(decided):
                return logits
            forced = torch.full_like(logits, float("-inf"))
            forced[decided[len(output)]] = 0.0
            return forced

        return only_decided if decided else None
