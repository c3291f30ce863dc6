"""Lets vLLM go on with an answer whose first tokens an earlier incarnation has decided.

vLLM has no request that begins in the middle of an answer, but it preempts requests and later computes them again: the
prompt and all tokens of the answer, in one prefill. So a resumed request gets its tokens as if it had been preempted
(``_internals.begin_behind``). All that follows from them comes out as if nothing had happened, because vLLM restores it
after every preemption: penalties, ``min_tokens``, bad words, custom logits processors, stop strings, counts, and the
end of the answer. Random numbers go on where they were.

What vLLM cannot restore it computes again, one step per token: a logits processor leaves one possible token at each
position that is decided (``DecidedTokens``). ``at_once`` says which tokens these are.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor, RequestLogitsProcessor

from omni_actors.stages.base import StageRequest
from omni_actors.stages.vllm.options import VLLMSampling

_DECIDED = "omni_actors.decided"
_AT_ONCE = "omni_actors.at_once"
_RESERVED = frozenset({_DECIDED, _AT_ONCE, "kv_transfer_params", "ec_transfer_params"})
"""The ``extra_args`` that no client sets: ours, and those by which vLLM moves blocks and encoded media."""


def at_once(request: StageRequest, params: VLLMSampling) -> int:
    """Return of how many outputs of the journal, from the first one on, vLLM computes the tokens in one prefill.

    Not those of the last output, usually one token: vLLM chooses it again, and sees by itself whether the answer ends
    there. None of an answer with

    - a structure: a new incarnation's grammar has accepted no token yet;
    - a budget for thinking: how vLLM counts after a preemption is not tested here;
    - log probabilities of the prompt: they are in vLLM's first output.

    With log probabilities of the answer, only outputs that are not needed any more: a prefill has none.
    """
    if not request.journal or any(
        value is not None for value in (params.structured_outputs, params.thinking_token_budget, params.prompt_logprobs)
    ):
        return 0
    before_last = len(request.journal) - 1
    has_logprobs = params.logprobs is not None or params.logprob_token_ids is not None
    return min(before_last, request.needed_from) if has_logprobs else before_last


def decide(sampling: SamplingParams, tokens: Sequence[int], at_once: int) -> None:
    """Let an answer begin with these tokens, and drop what its client must not set.

    at_once: how many of them vLLM computes in one prefill.
    """
    others = {name: value for name, value in (sampling.extra_args or {}).items() if name not in _RESERVED}
    ours = {_DECIDED: list(tokens), _AT_ONCE: at_once} if tokens else {}
    sampling.extra_args = {**others, **ours} or None


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
