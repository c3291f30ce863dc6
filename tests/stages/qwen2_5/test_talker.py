"""Qwen2.5-Omni's talker alone: it starts with the first rows, waits for no more than it needs, and refuses the rest."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from omni_actors.stages.base import InvalidRequest
from tiny_models import qwen2_5 as tiny

pytestmark = pytest.mark.voice  # it needs the libraries of the extra; the weights are random

NAME, SOURCE = "qwen2_5_talker", ("thinker",)
WIDTH = 64
PROMPT = 20


def rows(count: int, seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).normal(0, 1, (count, WIDTH)).astype(np.float32)


def once(prompt: int = PROMPT) -> dict[str, Any]:
    places = np.arange(prompt)
    return {"ids": places, "positions": places[None].repeat(3, 0), "tts": rows(4, 9)}


def feed(driver: Any, number: int, *, last: bool = False, **tensors: Any) -> None:
    driver.feed(number, {}, tensors, last=last, source="thinker")


def codes_of(outputs: list[Any]) -> list[int]:
    return [int(output.tensors["codes"][0, 0]) for output in outputs if output.tensors]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("qwen2_5"), codec_eos=0)


@pytest.fixture(scope="module")
def engine(checkpoint: Path, open_stage: Callable[..., Any]) -> Any:
    with closing(open_stage(NAME, checkpoint, prefill_chunk=8, context=60)) as opened:
        yield opened


def test_prompt_rows_are_prefilled_on_arrival_and_the_first_token_is_one_step_from_a_code(
    engine: Any, drive: Any
) -> None:
    driver = drive(engine)
    driver.start(1, SOURCE, talker_temperature=0.0)
    feed(driver, 1, **once(), rows=rows(9))
    assert driver.step() == []
    assert not engine.busy, "8 of 9 rows are a prefill chunk"
    feed(driver, 1, rows=rows(PROMPT - 9))
    assert driver.run() == {}
    feed(driver, 1, rows=rows(1))
    (output,) = driver.step()
    assert output.tensors["codes"].shape == (1, 1)
    assert not engine.busy
    driver.abort(1)


def test_a_request_without_text_delays_no_other_and_ended_text_is_not_waited_for(engine: Any, drive: Any) -> None:
    driver = drive(engine)
    for number in (1, 2):
        driver.start(number, SOURCE, talker_temperature=0.0, talker_max_tokens=6)
        feed(driver, number, **once(), rows=rows(PROMPT))
    feed(driver, 1, rows=rows(3))
    feed(driver, 2, rows=rows(1), last=True)
    outputs = driver.run()
    assert len(codes_of(outputs[1])) == 3, "a code for each row of text"
    assert not outputs[1][-1].last
    assert len(codes_of(outputs[2])) == 6
    assert [output.last for output in outputs[2]] == [False] * 5 + [True], "the last code comes with the end"
    feed(driver, 1, last=True)
    assert len(codes_of(driver.run()[1])) == 3


def test_the_seed_and_the_speaker_decide_the_codes(engine: Any, drive: Any) -> None:
    driver = drive(engine)

    def chosen(**params: Any) -> list[int]:
        driver.start(1, SOURCE, talker_max_tokens=12, **params)
        feed(driver, 1, **once(), rows=rows(PROMPT + 4), last=True)
        return codes_of(driver.run()[1])

    assert chosen(seed=1) == chosen(seed=1, speaker="chelsie")
    assert len({tuple(chosen(**params)) for params in ({"seed": 1}, {"seed": 2}, {"seed": 1, "speaker": "Ethan"})}) == 3


def test_an_answer_ends_at_the_end_of_the_context(engine: Any, drive: Any) -> None:
    driver = drive(engine)
    driver.start(1, SOURCE, talker_temperature=0.0)
    feed(driver, 1, **once(), rows=rows(PROMPT + 1), last=True)
    assert len(codes_of(driver.run()[1])) == 60 - PROMPT - 2


@pytest.mark.parametrize(
    ("tensors", "param", "code", "message"),
    [
        ({"rows": rows(1)}, "rows", "invalid_value", "after a first chunk"),
        ({**once(), "rows": rows(2)[:, 1:]}, "rows", "invalid_value", r"\(n, 64\) .* not \(2, 63\)"),
        ({**once(), "rows": rows(2)[0]}, "rows", "invalid_value", r"not \(64,\)"),
        (once(58), "messages", "context_length_exceeded", "takes 60 positions of the talker's context, which has 60"),
    ],
)
def test_tensors_that_no_thinker_sends_are_refused(
    engine: Any, drive: Any, tensors: dict[str, Any], param: str, code: str, message: str
) -> None:
    driver = drive(engine)
    driver.start(1, SOURCE)
    driver.live.discard(1)
    with pytest.raises(InvalidRequest, match=message) as caught:
        feed(driver, 1, **tensors)
    assert (caught.value.param, caught.value.code) == (param, code)
    assert not engine.busy


def test_an_unknown_speaker_is_refused_by_name(engine: Any, drive: Any) -> None:
    with pytest.raises(InvalidRequest, match="'Cherry'; the model has Chelsie, Ethan") as caught:
        drive(engine).start(1, SOURCE, speaker="Cherry")
    assert caught.value.param == "speaker"
