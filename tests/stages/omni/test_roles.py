"""Thinkers that prefill and decode in two stages: text, and rows for the talker, are those of one stage."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from typing import Any

import numpy as np
import pytest

from omni_actors.stages.base import Decisions, InvalidRequest
from tests.support.closeness import assert_same_results
from tests.support.conformance import chunks
from tests.support.engine_driver import Driver, for_stages, run_chain
from tests.support.omni_questions import STORY, SYSTEM, Ask
from tiny_models import qwen2_5, qwen3

pytestmark = [
    pytest.mark.voice,  # it needs the libraries of the extra; the weights are random
    pytest.mark.usefixtures("clear_choices"),
]

BLOCK = 5
ASKS = {
    "text": Ask(STORY, SYSTEM),
    "media": Ask(STORY, SYSTEM, audio=(0.5,), image=((64, 64),)),
    "video": Ask("what is it ?", video=4),
}
PARAMS: dict[str, Any] = {"max_tokens": 6, "ignore_eos": True}


@pytest.fixture(scope="module", params=["qwen3_thinker", "qwen2_5_thinker"])
def engines(
    request: pytest.FixtureRequest, open_stage: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Any]]:
    """By role."""
    tiny = qwen3 if request.param == "qwen3_thinker" else qwen2_5
    directory = tiny.save(tmp_path_factory.mktemp("checkpoint"))
    with ExitStack() as stack:
        yield {
            role: stack.enter_context(closing(open_stage(request.param, directory, prefill_chunk=BLOCK, role=role)))
            for role in ("both", "prefill", "decode")
        }


@pytest.fixture
def drivers(engines: dict[str, Any], drive: Callable[..., Driver]) -> dict[str, Driver]:
    return {role: drive(engine) for role, engine in engines.items()}


def feed(driver: Driver, ask: Ask) -> None:
    for number, chunk in enumerate(ask.chunks):
        driver.feed(1, *chunk, last=number == len(ask.chunks) - 1)


def alone(driver: Driver, ask: Ask, **terms: Any) -> list[Any]:
    driver.start(1, **{**PARAMS, **terms})
    feed(driver, ask)
    outputs: list[Any] = driver.run()[1]
    return outputs


def apart(
    drivers: dict[str, Driver], ask: Ask, journal: tuple[Decisions, ...] = (), *, downstream: bool = True, **params: Any
) -> list[Any]:
    def arrive() -> None:
        terms = {**PARAMS, **params}
        drivers["decode"].start(1, ("prefill",), journal=journal, downstream=downstream, **terms)
        drivers["prefill"].start(1, **terms)
        feed(drivers["prefill"], ask)

    stages = {role: drivers[role] for role in ("prefill", "decode")}
    return run_chain(stages, [arrive])["decode"][1]


@pytest.mark.parametrize("ask", [pytest.param(ask, id=name) for name, ask in ASKS.items()])
@pytest.mark.parametrize("downstream", [True, False], ids=["with a talker", "text alone"])
@pytest.mark.slow
def test_text_and_rows_are_those_of_one_stage(drivers: dict[str, Driver], ask: Ask, downstream: bool) -> None:
    expected = alone(drivers["both"], ask, downstream=downstream)
    found = apart(drivers, ask, downstream=downstream)
    assert [output.decisions for output in found] == [output.decisions for output in expected]
    assert_same_results(chunks(found), chunks(expected))


def test_a_sampled_answer_is_that_of_one_stage(drivers: dict[str, Driver]) -> None:
    sampled = {"temperature": 1.0, "seed": 4, "repetition_penalty": 1.3, "max_tokens": 12}
    expected = alone(drivers["both"], ASKS["media"], **sampled)
    assert_same_results(chunks(apart(drivers, ASKS["media"], **sampled)), chunks(expected))


@pytest.mark.parametrize("cut", [1, 3, 6])
def test_decode_goes_on_behind_its_journal(drivers: dict[str, Driver], cut: int) -> None:
    expected = alone(drivers["both"], ASKS["media"])
    journal = tuple(output.decisions for output in expected[:cut])
    assert_same_results(chunks(apart(drivers, ASKS["media"], journal)), chunks(expected))


def test_a_prompt_of_embeddings_is_for_text_alone(drivers: dict[str, Driver], engines: dict[str, Any]) -> None:
    hidden = engines["both"]._language.config.hidden_size
    embeds = np.random.default_rng(0).normal(0, 1, (9, hidden)).astype(np.float32)

    def ask(driver: Driver, **terms: Any) -> None:
        driver.start(1, **{**PARAMS, **terms})
        driver.feed(1, {}, {"embeds": embeds}, last=True)

    ask(drivers["both"], downstream=False)
    expected = drivers["both"].run()[1]
    ask(drivers["prefill"])
    sent = drivers["prefill"].run()[1]
    drivers["decode"].start(1, ("prefill",), downstream=False, **PARAMS)
    for output in sent:
        drivers["decode"].feed(1, output.data, for_stages(output), last=output.last, source="prefill")
    assert_same_results(chunks(drivers["decode"].run()[1]), chunks(expected))
    drivers["decode"].start(2, ("prefill",), **PARAMS)
    with pytest.raises(InvalidRequest, match="talker"):
        drivers["decode"].feed(2, sent[0].data, for_stages(sent[0]), source="prefill")
    drivers["decode"].live.discard(2)


@pytest.mark.usefixtures("lenient_choices")
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_warm_up_leaves_nothing(engines: dict[str, Any], role: str) -> None:
    engines[role].warm_up()
    assert not engines[role].busy
    assert engines[role]._cache.lengths == []
