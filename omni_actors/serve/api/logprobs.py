"""Log probabilities in the two formats of OpenAI's API, from those of an engine's outputs.

An output's data has ``logprobs``: for each token a list of ``{"token_id", "logprob", "rank", "token"}``, the chosen
token first. A token that is a part of a character has U+FFFD as its text, and its bytes are not known.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Positions = Sequence[Sequence[Mapping[str, Any]]]


def chat_logprobs(positions: Positions, count: int) -> dict[str, Any]:
    """Return the object of the chat API. count: how many of the most likely tokens each position shows."""
    content = [
        _entry(position[0]) | {"top_logprobs": [_entry(each) for each in _most_likely(position, count)]}
        for position in positions
    ]
    return {"content": content, "refusal": None}


def _entry(found: Mapping[str, Any]) -> dict[str, Any]:
    token = found["token"] or ""
    data = None if "\ufffd" in token else list(token.encode("utf-8", "replace"))
    return {"token": token, "logprob": found["logprob"], "bytes": data}


def _most_likely(position: Sequence[Mapping[str, Any]], count: int) -> list[Mapping[str, Any]]:
    return sorted((each for each in position if each["rank"] <= count), key=lambda each: int(each["rank"]))


def completion_logprobs(positions: Positions, offset: int) -> dict[str, Any]:
    """Return the object of the completion API. offset: characters of the tokens before the first one."""
    tokens = [position[0]["token"] or "" for position in positions]
    offsets = [offset + sum(map(len, tokens[:at])) for at in range(len(tokens))]
    return {
        "tokens": tokens,
        "token_logprobs": [position[0]["logprob"] for position in positions],
        "top_logprobs": list(map(_by_text, positions)),
        "text_offset": offsets,
    }


def _by_text(position: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the log probability of each text: the highest one of tokens with the same text."""
    found: dict[str, float] = {}
    for each in position:
        text = each["token"] or ""
        found[text] = max(each["logprob"], found.get(text, each["logprob"]))
    return found
