"""thinker, talker and code2wav together say what transformers' own ``generate`` says: the same tokens, codes, samples.

The engines are driven as the workers' loops would: whatever one gives out is fed to the next one at once, and a stage
that has ended takes no more. Random weights say something else for every other input, so an answer that is equal leaves
little that could be wrong before it. ``test_the_asks_are_of_every_kind`` holds the cases to what they are here for.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from typing import Any

import numpy as np
import pytest

from tests.support.closeness import assert_same_sound
from tests.support.engine_driver import Driver
from tests.support.omni_questions import ASKS, STORY, SYSTEM, Ask, sixteen
from tests.support.qwen3_chain import Qwen3Chain
from tiny_models import qwen3 as tiny

# The extra's libraries; the weights are random.
pytestmark = [pytest.mark.voice, pytest.mark.usefixtures("clear_choices")]

CHECKPOINTS: dict[str, dict[str, Any]] = {
    "wordy": {"seed": 1},
    "brief": {"seed": 5, "text_eos": 3.0, "codec_eos": 3.0},
    "other": {
        "seed": 3,
        "hidden": 48,
        "talker_hidden": 80,
        "layers": 3,
        "talker_layers": 3,
        "experts": 4,
        "experts_per_token": 1,
        "deepstack": (1, 3),
        "groups": 6,
        "speakers": ("ada", "bob"),
    },
    "endless": {"seed": 4, "text_eos": 0.0, "codec_eos": 0.0, "groups": 2, "talker_layers": 1},
}
OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "wordy": ({"prefill_chunk": 16, "max_batch": 5}, {"prefill_chunk": 7, "max_batch": 6}),
    "brief": ({}, {}),
    "other": ({"prefill_chunk": 5}, {"prefill_chunk": 3}),
}
"""Of the thinker and the talker."""


@pytest.fixture(scope="module")
def pipeline(
    open_stage: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str], Qwen3Chain]]:
    """Name of a checkpoint -> its pipeline, opened once."""
    with ExitStack() as stack:

        def open_engine(*args: Any, **options: Any) -> Any:
            return stack.enter_context(closing(open_stage(*args, **options)))

        @functools.cache
        def get(name: str) -> Qwen3Chain:
            directory = tiny.save(tmp_path_factory.mktemp(name), **CHECKPOINTS[name])
            return Qwen3Chain(directory, open_engine, OPTIONS.get(name, ({}, {})))

        yield get


EVERYWHERE = [(name, ask) for name in ("wordy", "brief") for ask in ASKS] + [
    ("other", ask._replace(speaker="bob" if number % 2 else "ada"))
    for number, ask in enumerate([ASKS[1], ASKS[3], ASKS[5], ASKS[7], ASKS[9]])
]


@pytest.mark.parametrize(("checkpoint", "ask"), EVERYWHERE)
def test_an_answer_is_the_references(pipeline: Callable[[str], Qwen3Chain], checkpoint: str, ask: Ask) -> None:
    ours = pipeline(checkpoint)
    ours.check(ask, *ours.said([ask]))


def test_the_asks_are_of_every_kind(pipeline: Callable[[str], Qwen3Chain]) -> None:
    answers = [(ask, pipeline(checkpoint).expected(ask)) for checkpoint, ask in EVERYWHERE]
    for media in (True, False):
        these = [(a, e) for a, e in answers if bool(a.audio or a.image or a.video) is media and e.crash is None]
        cut = [len(answer.ids) == ask.max_tokens for ask, answer in these]
        assert any(cut), "the text reaches its limit"
        assert not all(cut), "or ends by itself"
        assert any(len(answer.codes) == ask.max_frames - 1 and not answer.talker_ended for ask, answer in these)
        assert any(0 < len(answer.codes) < len(answer.ids) and answer.talker_ended for _, answer in these), (
            "speech ends before the text does"
        )
        assert any(len(answer.codes) > len(answer.ids) and answer.talker_ended for _, answer in these), "or after it"
        assert len({tuple(answer.ids) for _, answer in these}) > len(these) / 2


@pytest.mark.parametrize(
    ("checkpoint", "ask", "crash"),
    [
        ("brief", Ask("hello how are you today ?", SYSTEM), "thinker"),
        ("brief", Ask("tell me"), "thinker"),
        ("brief", Ask("more"), "talker"),
        ("brief", Ask("zip", SYSTEM, speaker="chelsie"), "talker"),
        ("wordy", Ask(STORY, max_tokens=1), "thinker"),
        ("wordy", Ask(STORY, max_frames=1), "talker"),
        ("wordy", Ask("what is it ?", image=((64, 64),), max_tokens=1), "thinker"),
    ],
)
def test_where_the_reference_crashes_the_text_is_right_and_there_is_no_sound(
    pipeline: Callable[[str], Qwen3Chain], checkpoint: str, ask: Ask, crash: str
) -> None:
    ours = pipeline(checkpoint)
    assert ours.expected(ask).crash == crash
    (said,) = ours.said([ask])
    ours.check(ask, said)
    assert said.wave.shape == (0,)


@pytest.mark.parametrize("seed", [0, 1])
def test_sixteen_at_once_are_answered_as_each_alone(pipeline: Callable[[str], Qwen3Chain], seed: int) -> None:
    """In fewer rows than there are requests, so that they join as others leave, in pieces of each other's prompts."""
    order = random.Random(seed)
    asks, ours = sixteen(order), pipeline("wordy")
    for ask, said in zip(asks, ours.said(asks, order if seed else None), strict=True):
        ours.check(ask, said)


def test_a_long_answer_sounds_as_the_reference_decodes_it(
    pipeline: Callable[[str], Qwen3Chain], open_stage: Callable[..., Any]
) -> None:
    """By more than one of its chunks of 300 frames; streamed, it is what ``check`` compares."""
    ours, ask = pipeline("endless"), Ask(STORY, max_tokens=5, max_frames=312)
    (said,) = ours.said([ask])
    ours.check(ask, said)
    expected = ours.expected(ask)
    assert len(expected.codes) == 311
    assert np.abs(expected.wave).max() > 0.05
    with closing(open_stage("qwen3_code2wav", ours.directory, decode="reference")) as engine:
        driver = Driver(engine)
        driver.start(1, ("talker",))
        for frame in said.codes:
            driver.feed(1, {}, {"codes": frame[None]}, source="talker")
        driver.feed(1, last=True, source="talker")
        sound = [output.tensors["audio"] for output in driver.run()[1] if output.tensors]
    assert_same_sound(np.concatenate(sound), expected.wave)
