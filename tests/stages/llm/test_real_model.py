"""The llm engine on a real model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from omni_actors.stages.llm.engine import LLMEngine
from tests.stages.llm.tiny_engine import Results, answer, assert_empty, engine_running, submit

pytestmark = pytest.mark.usefixtures("clear_choices")


@pytest.fixture(scope="module")
def real(open_stage: Callable[..., LLMEngine], smollm2: Path) -> Iterator[LLMEngine]:
    """The real model with default options: 8 requests in a batch."""
    with closing(open_stage("llm", smollm2)) as engine:
        yield engine


QUESTIONS = [
    "Why is the sky blue?",
    "Tell me a story about the sea.",
    "Write a poem about autumn leaves.",
    "How do I bake bread?",
    "Explain what a prime number is.",
    "What are the planets of the solar system, in order?",
    "Who wrote Hamlet?",
    "What is the capital of France?",
]
"""Those with the shortest answers come last, so that all are in the batch when the last one joins it."""


@pytest.mark.voice
@pytest.mark.slow
def test_the_capital_of_france_is_paris(real: LLMEngine) -> None:
    text, end = answer(real, QUESTIONS[-1], max_tokens=32)
    assert "Paris" in text
    assert end["finish_reason"] == "stop"


@pytest.mark.slow
@pytest.mark.voice
def test_the_real_model_gives_the_same_answers_alone_and_in_a_batch(real: LLMEngine) -> None:
    """Greedy and sampled requests alternate. When all have joined, those in every other row end before the rest."""
    ways: list[dict[str, Any]] = [
        {},
        {"temperature": 0.8, "top_p": 0.9, "seed": 12},
    ]
    lengths = [10 - number + 3 * (number % 2) for number in range(len(QUESTIONS))]
    asks = [(QUESTIONS[n], {"max_tokens": length, **ways[n % 2]}) for n, length in enumerate(lengths)]
    alone = [answer(real, question, **params)[0] for question, params in asks]
    results = Results()
    for number, (question, params) in enumerate(asks):
        submit(real, number, question, **params)
        results.step(real)
    assert engine_running(real) == list(range(len(asks))), "all at once"
    results.run(real)
    assert [results.text(number) for number in range(len(asks))] == alone
    assert_empty(real)
