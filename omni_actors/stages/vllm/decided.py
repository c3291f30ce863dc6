"""Lets vLLM choose tokens again that an earlier incarnation has decided.

vLLM has no request that begins in the middle of an answer. So a resumed request begins with its prompt, and this logits
processor leaves one possible token at each position that is decided. All else takes its usual course: penalties, random
numbers, stop strings, logprobs (which vLLM takes from the logits before any processor), structured output and counts
come out as if nothing had happened. The cost is one step per decided token, beside those of other requests.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor, RequestLogitsProcessor

_KEY = "omni_actors.decided"
_RESERVED = frozenset({_KEY, "kv_transfer_params", "ec_transfer_params"})
"""The ``extra_args`` that no client sets: ours, and those by which vLLM moves blocks and encoded media."""


def force(sampling: SamplingParams, tokens: Sequence[int]) -> None:
    """Let a request's answer begin with these tokens, and drop what its client must not set."""
    others = {name: value for name, value in (sampling.extra_args or {}).items() if name not in _RESERVED}
    sampling.extra_args = {**others, _KEY: list(tokens)} if tokens else others or None


class DecidedTokens(AdapterLogitsProcessor):  # type: ignore[misc]  # vLLM has no types where it is not installed
    """A logits processor of vLLM. See the module."""

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> RequestLogitsProcessor | None:
        decided: list[int] = (params.extra_args or {}).get(_KEY, [])

        def only_decided(output: list[int], logits: Tensor) -> Tensor:
            if len(output) >= len(decided):
                return logits
            forced = torch.full_like(logits, float("-inf"))
            forced[decided[len(output)]] = 0.0
            return forced

        return only_decided if decided else None
