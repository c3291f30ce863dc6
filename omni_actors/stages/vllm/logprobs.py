"""Log probabilities on vLLM: data of an output, and numbers of a journal.

If a request asked for them, an output's data has ``logprobs``: for each new token a list of ``{"token_id", "logprob",
"rank", "token"}``, in vLLM's order. ``prompt_logprobs`` has the same for each token of the prompt (null for the first).
In a journal they are msgpack, without the names. Floats are 64-bit, so each value comes out as it was.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from vllm import SamplingParams

from omni_actors.stages.base import Decisions
from omni_actors.stages.packing import pack, unpack

_OUTPUT = "logprobs", "prompt_logprobs"
_TOKEN = "token_id", "logprob", "rank", "token"


def of_answer(sampling: SamplingParams) -> bool:
    """Return whether the answer has log probabilities."""
    return sampling.logprobs is not None or sampling.logprob_token_ids is not None


def of_any(sampling: SamplingParams) -> bool:
    """Return whether the answer or the prompt has log probabilities."""
    prompt = sampling.prompt_logprobs is not None or sampling.prompt_logprob_token_ids is not None
    return prompt or of_answer(sampling)


def logprobs_of(output: Any, answer: Any) -> dict[str, Any]:
    """Return the output's data about log probabilities, empty unless the request asked for them.

    output: a ``RequestOutput`` of vLLM, which has the prompt's once. answer: one of its ``CompletionOutput``.
    """
    data: dict[str, Any] = {}
    if answer.logprobs:
        data["logprobs"] = [_logprobs(position) for position in answer.logprobs]
    if output.prompt_logprobs:
        data["prompt_logprobs"] = [position and _logprobs(position) for position in output.prompt_logprobs]
    return data


def _logprobs(position: Mapping[int, Any]) -> list[dict[str, Any]]:
    return [
        dict(zip(_TOKEN, (token, found.logprob, found.rank, found.decoded_token), strict=True))
        for token, found in position.items()
    ]


def to_numbers(data: Mapping[str, Any]) -> Decisions:
    """Return an output's log probabilities as numbers of a journal. data: may have more than these."""
    values = [
        [position and [[*found.values()] for found in position] for position in data.get(name, ())] for name in _OUTPUT
    ]
    return pack(msgspec.msgpack.encode(values))


def from_numbers(numbers: Decisions) -> dict[str, Any]:
    """Return the data of which ``to_numbers`` made these numbers."""
    values = msgspec.msgpack.decode(unpack(numbers))
    return {
        name: [position and [dict(zip(_TOKEN, found, strict=True)) for found in position] for position in positions]
        for name, positions in zip(_OUTPUT, values, strict=True)
        if positions
    }
