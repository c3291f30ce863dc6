"""Requests to an llm engine that begin behind decided tokens, and what their answers must be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from omni_actors.stages.base import Decisions
from tests.stages.llm.tiny_engine import user
from tests.support.engine_driver import Driver

SAMPLED = {"temperature": 1.0, "seed": 3, "max_tokens": 20}
PARAMS = {
    "greedy": {"max_tokens": 20},
    "penalised": {"max_tokens": 20, "repetition_penalty": 1.5},
    "sampled": {**SAMPLED, "top_p": 0.9, "top_k": 40, "repetition_penalty": 1.3},
    "min_tokens": {**SAMPLED, "min_tokens": 9, "stop_token_ids": tuple(range(0, 280, 2))},
    "counted": {**SAMPLED, "frequency_penalty": 0.7, "presence_penalty": 0.4, "logit_bias": {"40": 3.0, "41": -100}},
    "logprobs": {**SAMPLED, "frequency_penalty": 0.7, "logprobs": 2},
    "one token": {"max_tokens": 1},
}


def submit(driver: Driver, request_id: int, prompt: str, journal: Sequence[Decisions] = (), **params: Any) -> None:
    driver.start(request_id, journal=tuple(journal), **params)
    driver.feed(request_id, user(prompt), last=True)


def answer(driver: Driver, prompt: str, journal: Sequence[Decisions] = (), **params: Any) -> list[Any]:
    submit(driver, 0, prompt, journal, **params)
    outputs: list[Any] = driver.run()[0]
    return outputs


def decisions(outputs: Sequence[Any]) -> list[Decisions]:
    return [output.decisions for output in outputs]


def check_every_cut(driver: Driver, prompt: str, **params: Any) -> list[Any]:
    expected = answer(driver, prompt, **params)
    assert sum(map(len, decisions(expected))) == expected[-1].data["completion_tokens"]
    for cut in range(len(expected) + 1):
        assert answer(driver, prompt, decisions(expected[:cut]), **params) == expected, f"cut {cut}"
    return expected
