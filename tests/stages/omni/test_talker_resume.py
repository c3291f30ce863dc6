"""Talkers that go on behind the codes of an earlier incarnation: the same codes, for the cost of a prefill."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import numpy as np
import pytest

from tests.support.forwards import record_forwards

pytestmark = [pytest.mark.voice, pytest.mark.usefixtures("clear_choices")]

PROMPT, ANSWER, WIDTH, PREFILL = 9, 14, 64, 16
PARAMS: dict[str, Any] = {"talker_max_tokens": 24, "talker_repetition_penalty": 1.3, "seed": 3}
SAMPLED, GREEDY = {"talker_temperature": 0.9}, {"talker_temperature": 0.0}


def tensors(name: str, seed: int) -> tuple[dict[str, Any], np.ndarray[Any, Any]]:
    """Return the first chunk's tensors, with all rows of the prompt, and the rows of the answer."""
    rows = np.random.default_rng(seed).normal(0, 1, (PROMPT + ANSWER, WIDTH)).astype(np.float32)
    places = np.arange(PROMPT)
    if name == "qwen3_talker":
        header = {"ids": places, "is_media": places == 2, "tts": rows[:3]}
    else:
        header = {"ids": places, "positions": places[None].repeat(3, 0), "tts": rows[:4]}
    return {**header, "rows": rows[:PROMPT]}, rows[PROMPT:]


class Talker:
    def __init__(self, name: str, driver: Any) -> None:
        self.name, self.driver, self.engine = name, driver, driver.engine

    def start(self, number: int, journal: Any = (), **params: Any) -> None:
        self.driver.start(number, ("thinker",), journal=tuple(journal), **{**PARAMS, **params})

    def feed_prompt(self, number: int, seed: int = 0) -> None:
        self.driver.feed(number, {}, tensors(self.name, seed)[0], source="thinker")

    def feed_answer(self, number: int, part: slice = slice(None), seed: int = 0) -> None:
        rows = tensors(self.name, seed)[1]
        self.driver.feed(number, {}, {"rows": rows[part]}, last=part.stop is None, source="thinker")

    def run(self, number: int, journal: Any = (), seed: int = 0, **params: Any) -> list[Any]:
        self.start(number, journal, **params)
        self.feed_prompt(number, seed)
        self.feed_answer(number, seed=seed)
        outputs: list[Any] = self.driver.run()[number]
        return outputs


@pytest.fixture(scope="module", params=["qwen3_talker", "qwen2_5_talker"])
def opened(request: pytest.FixtureRequest, open_stage: Callable[..., Any], tmp_path_factory: Any) -> Iterator[Any]:
    """Return the name and an engine whose requests do not end by themselves."""
    from tiny_models import qwen2_5, qwen3

    path = tmp_path_factory.mktemp(request.param)
    model = qwen3.save(path, codec_eos=0.0) if request.param == "qwen3_talker" else qwen2_5.save(path, codec_eos=0)
    with closing(open_stage(request.param, model, prefill_chunk=PREFILL)) as engine:
        ends = {engine._config.codec_eos_token_id} if request.param == "qwen3_talker" else engine._ends
        engine._suppressed[list(ends)] = True
        yield request.param, engine


@pytest.fixture
def talker(opened: Any, drive: Any) -> Talker:
    name, engine = opened
    return Talker(name, drive(engine))


def chunks(outputs: list[Any]) -> list[Any]:
    return [
        (o.decisions, {n: (t.dtype, t.tolist()) for n, t in o.tensors.items()}, dict(o.data), o.last) for o in outputs
    ]


def decided(outputs: list[Any]) -> list[Any]:
    return [output.decisions for output in outputs]


@pytest.mark.parametrize(
    "sampling", [pytest.param(SAMPLED, id="sampled"), pytest.param(GREEDY, id="greedy", marks=pytest.mark.slow)]
)
def test_a_resumed_request_gives_the_outputs_of_an_undisturbed_one(talker: Talker, sampling: dict[str, float]) -> None:
    expected = talker.run(1, **sampling)
    assert len(expected) == 24
    for size in (0, 1, 11, 23, 24):
        assert chunks(talker.run(1, decided(expected)[:size], **sampling)) == chunks(expected)


def test_a_resumed_request_beside_others_in_its_batch(talker: Talker) -> None:
    expected = {number: talker.run(number, seed=number) for number in (1, 2, 3)}
    for number in expected:
        talker.start(number, decided(expected[number])[: 6 * number - 6])
        talker.feed_prompt(number, number)
    outputs: dict[int, list[Any]] = {number: [] for number in expected}
    for part in (slice(0, 1), slice(1, 9), slice(9, 11), slice(11, None)):
        for number in expected:
            talker.feed_answer(number, part, number)
        for output in talker.driver.step():
            outputs[output.request_id].append(output)
    for number, more in talker.driver.run().items():
        outputs[number] += more
    for number in expected:
        assert chunks(outputs[number]) == chunks(expected[number])


def test_a_resume_costs_a_prefill(talker: Talker, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = talker.run(1)
    forwards = record_forwards(talker.engine, monkeypatch)
    talker.run(1, decided(expected)[:20])
    prompt = PROMPT + (1 if talker.name == "qwen2_5_talker" else 5)
    assert sum(forwards[:-4]) == prompt + 20
    assert forwards[:-4] == [PREFILL] * ((prompt + 20) // PREFILL) + [(prompt + 20) % PREFILL]
    assert forwards[-4:] == [1] * 4
    forwards.clear()
    talker.run(1, decided(expected))
    assert not forwards, "the end is decided"


def test_decided_codes_are_followed_whatever_the_engine_would_choose(talker: Talker) -> None:
    own = decided(talker.run(1))
    forced = decided(talker.run(1, seed=8))[:12]
    assert forced != own[:12]
    behind = decided(talker.run(1, forced))
    assert behind[:12] == forced
    assert behind[12:] != own[12:]
    assert decided(talker.run(1, behind[:17])) == behind, "the same as when some of them were not decided yet"


def test_the_outputs_come_before_any_input_and_the_next_code_waits_for_its_row(talker: Talker) -> None:
    expected = talker.run(1)
    talker.start(1, decided(expected)[:8])
    assert chunks(talker.driver.run()[1]) == chunks(expected[:8])
    talker.feed_prompt(1)
    talker.feed_answer(1, slice(0, 8))
    assert not talker.driver.run(), "the position behind the last decided code has no row"
    talker.feed_answer(1, slice(8, 9))
    assert chunks(talker.driver.run()[1]) == chunks(expected[8:9])
    talker.feed_answer(1, slice(9, None))
    assert chunks(talker.driver.run()[1]) == chunks(expected[9:])


def test_an_answer_without_a_row_ends_again(talker: Talker) -> None:
    for journal in [(), ((-1,),)]:
        talker.start(1, journal)
        talker.feed_prompt(1)
        talker.driver.feed(1, {}, {}, last=True, source="thinker")
        [output] = talker.driver.run()[1]
        assert (output.last, output.tensors, output.decisions) == (True, {}, (-1,))
        assert not talker.engine.busy


@pytest.mark.parametrize("size", [8, pytest.param(24, marks=pytest.mark.slow)])
@pytest.mark.parametrize("fed", [False, True])
@pytest.mark.parametrize("stepped", [False, True])
def test_a_resumed_request_can_be_aborted(talker: Talker, size: int, fed: bool, stepped: bool) -> None:
    journal = decided(talker.run(1))[:size]
    talker.start(1, journal)
    if fed:
        talker.feed_prompt(1)
        talker.feed_answer(1, slice(0, 4))
    if stepped:
        talker.driver.step()
    talker.driver.abort(1)
    assert not talker.engine.busy
    assert not talker.engine._requests
    assert not talker.engine._scheduler.rows
