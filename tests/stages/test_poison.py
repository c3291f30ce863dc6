"""Hostile requests in a batch with five normal ones, which get the same outputs as alone."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from typing import Any

import numpy as np
import pytest
import torch

from omni_actors.stages.base import CLIENT, InvalidRequest, StageFailure
from tests.support import engine_cases as cases
from tests.support.engine_cases import Case

pytestmark = [pytest.mark.voice, pytest.mark.usefixtures("clear_choices")]

POISON = 6
NORMAL = (0, 1, 2, 3, 4)

NUMBERS = (f"It is {10**36}.", f"{10**36}", "1" * 300, "⑴ and ⑼", "②x", "$" + "9" * 40, ")AM7İ°!")


@pytest.fixture
def beside_five(request: pytest.FixtureRequest, drive: Callable[..., Any]) -> Callable[..., Any]:
    """run(make, poison, engine=None): run five normal requests of a case and what ``poison(driver)`` starts and feeds.

    Returns the outputs of the request number ``POISON``.
    """

    def run(make: Callable[..., Case], poison: Callable[[Any], None], engine: Any = None) -> list[Any]:
        case = make(request)
        driver = drive(engine or case.opened)
        for number in NORMAL:
            case.start(driver, number)
            case.feed(driver, number, number % 2, slice(0, 1))
        poison(driver)
        for number in NORMAL:
            case.feed(driver, number, number % 2, slice(1, None))
        outputs = driver.run()
        for number in NORMAL:
            case.check(driver, outputs[number], number % 2)
        return list(outputs.get(POISON, []))

    return run


@pytest.mark.parametrize("source", [CLIENT, pytest.param("thinker", marks=pytest.mark.slow)])
@pytest.mark.parametrize("text", NUMBERS)
def test_a_number_beyond_the_number_words_is_spoken(beside_five: Callable[..., Any], text: str, source: str) -> None:
    def poison(driver: Any) -> None:
        driver.start(POISON, (source,))
        driver.feed(POISON, {"text": text}, source=source, last=True)

    outputs = beside_five(cases.hibari_acoustic, poison)
    assert outputs[-1].last
    assert outputs[0].tensors["f0"].size > 40
    assert "".join(output.data.get("text", "") for output in outputs) == text


@pytest.mark.parametrize(
    ("make", "name"), [(cases.llm, "repetition_penalty"), (cases.qwen3_talker, "talker_repetition_penalty")]
)
@pytest.mark.parametrize("value", [1e-38, 1e-45, float("nan"), 1e308])
def test_a_penalty_that_would_overflow_is_refused(
    beside_five: Callable[..., Any], make: Callable[..., Case], name: str, value: float
) -> None:
    def poison(driver: Any) -> None:
        with pytest.raises(InvalidRequest) as refused:
            driver.start(POISON, (CLIENT,), **{name: value})
        assert refused.value.param == name

    assert beside_five(make, poison) == []


@pytest.mark.parametrize("params", [{}, {"temperature": 1.0, "seed": 1}, {"repetition_penalty": 1.3}])
def test_logits_that_are_not_finite_fail_their_request_only(
    beside_five: Callable[..., Any], open_stage: Callable[..., Any], params: dict[str, Any]
) -> None:
    def poison(driver: Any) -> None:
        driver.start(POISON, (CLIENT,), max_tokens=8, **params)
        driver.feed(POISON, {"messages": [{"role": "user", "content": "\N{SKULL}"}]}, last=True)

    with closing(open_stage("llm")) as engine:
        [token, *_] = engine._vocabulary.tokenizer.encode("\N{SKULL}", add_special_tokens=False)
        with torch.inference_mode():
            engine._model.get_input_embeddings().weight[token] = torch.nan
        [failure] = beside_five(cases.llm, poison, engine)
    assert isinstance(failure, StageFailure)
    assert failure.error.code == "output_not_finite"


def test_hidden_states_that_overflow_fail_their_request_only(beside_five: Callable[..., Any]) -> None:
    def poison(driver: Any) -> None:
        rows = np.full((9, 64), 3e38, np.float32)
        once = {"ids": np.arange(9), "is_media": np.zeros(9, np.bool_), "tts": rows[:3]}
        driver.start(POISON, ("thinker",), talker_max_tokens=8, seed=0)
        driver.feed(POISON, {}, {**once, "rows": rows}, source="thinker")
        driver.feed(POISON, {}, {"rows": rows}, source="thinker", last=True)

    [failure] = beside_five(cases.qwen3_talker, poison)
    assert isinstance(failure, StageFailure)
    assert failure.error.code == "output_not_finite"
