"""Lets vLLM go on with answers whose first tokens an earlier incarnation has decided: which tokens, and how.

vLLM has no request that begins in the middle of an answer, but it preempts requests and later computes them again: the
prompt and all tokens of the answer, in one prefill. So a resumed answer gets its tokens as if it had been preempted
(``replay``, ``_internals.StageWorker``). All that follows from them comes out as if nothing had happened, because vLLM
restores it after every preemption: penalties, ``min_tokens``, bad words, custom logits processors, and counts. Random
numbers go on where they were. vLLM's own functions find the end of the answer, stop strings and a structure's state.

What vLLM cannot restore it computes again, one step per token: a logits processor leaves one possible token at each
position that is decided (``DecidedTokens``). ``at_once`` says which tokens these are.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import NamedTuple

import torch
from torch import Tensor
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor, RequestLogitsProcessor

from omni_actors.stages.base import Decisions, StageRequest

_DECIDED = "omni_actors.decided"
_AT_ONCE = "omni_actors.at_once"
_RESERVED = frozenset({_DECIDED, _AT_ONCE, "kv_transfer_params", "ec_transfer_params"})
"""The ``extra_args`` that no client sets: ours, and those by which vLLM moves blocks and encoded media."""


class Entry(NamedTuple):
    """What one output has decided. In a journal it is the tokens; with several answers (``n``), after the answer."""

    answer: int
    """The answer's index, 0 if there is only one."""
    tokens: Decisions

    def decisions(self, n: int) -> Decisions:
        """Return it as an entry of the journal of a request with n answers."""
        return self.tokens if n == 1 else (self.answer, *self.tokens)


def entries(journal: Sequence[Decisions], n: int) -> list[Entry]:
    """Return the entries of the journal of a request with n answers."""
    return [Entry(0, each) if n == 1 else Entry(each[0], each[1:]) for each in journal]


def has_logprobs(sampling: SamplingParams) -> bool:
    """Return whether the answer has log probabilities."""
    return sampling.logprobs is not None or sampling.logprob_token_ids is not None


def at_once(journal: Sequence[Entry], request: StageRequest, sampling: SamplingParams) -> int:
    """Return of how many outputs of the journal, from the first one on, vLLM can compute the tokens in one prefill.

    None of an answer with a budget for thinking: how vLLM counts after a preemption is not tested here. With log
    probabilities of the answer, only outputs that are not needed any more: a prefill has none. With log probabilities
    of the prompt, only the outputs before the first needed one that has these: that is the first output of an answer.
    """
    if sampling.thinking_token_budget is not None:
        return 0
    end = len(journal)
    if has_logprobs(sampling):
        end = min(end, request.needed_from)
    if sampling.prompt_logprobs is not None or sampling.prompt_logprob_token_ids is not None:
        answers = set[int]()
        for number, entry in enumerate(journal[:end]):
            if entry.tokens and entry.answer not in answers and number >= request.needed_from:
                return number
            answers |= {entry.answer} if entry.tokens else set()
    return end


def drop_reserved(sampling: SamplingParams) -> None:
    """Drop what a client must not set."""
    sampling.extra_args = {k: v for k, v in (sampling.extra_args or {}).items() if k not in _RESERVED} or None


def begin_with(sampling: SamplingParams, tokens: Sequence[int], at_once: int) -> SamplingParams:
    """Return the parameters of an answer that begins with these tokens.

    at_once: how many of them vLLM computes in one prefill. The log probabilities of the prompt were in the first
    output, so vLLM need not compute them again if that is among these.
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
