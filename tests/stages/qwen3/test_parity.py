"""Thinker, talker and code2wav against transformers' ``generate``: the same tokens, codes and samples.

The engines are driven as engine loops drive them: each output is fed to the downstream engine at once, and a stage that
has ended takes no more. With random weights every input gives another answer, so an equal answer leaves little room for
errors before it. ``test_the_cases_cover_every_kind_of_ending`` checks that the cases cover what they are meant to.
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

# They need the libraries of the extra. The weights are random.
pytestmark = [pytest.mark.voice, pytest.mark.usefixtures("clear_choices")]

CHECKPOINTS: dict[str, dict[str, Any]] = {
    "wordy": {"seed": 1},
    "brief": {"seed": 5, "text_eos": 3.0, "codec_eos": 3.0},
    "other": {
        "seed": 15,
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
"""The options of the thinker and of the talker."""


@pytest.fixture(scope="module")
def pipeline(
    open_stage: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str], Qwen3Chain]]:
    """Return a function from a checkpoint's name to its pipeline, which it opens once."""
    with ExitStack() as stack:

        def open_engine(*args: Any, **options: Any) -> Any:
            return stack.enter_context(closing(open_stage(*args, **options)))

        @functools.cache
        def get(name: str) -> Qwen3Chain:
            directory = tiny.save(tmp_path_factory.mktemp(name), **CHECKPOINTS[name])
            return Qwen3Chain(directory, open_engine, OPTIONS.get(name, ({}, {})))

        yield get


BRIEF = [ask._replace(system="") if ask == ASKS[7] else ask for ask in ASKS]
"""With the system prompt, one expert leads another by less than ``CLEAR``."""
OTHER = [ask._replace(speaker="bob" if number % 2 else "ada") for number, ask in enumerate(ASKS[1::2])]
EVERYWHERE = [(name, ask) for name, asks in (("wordy", ASKS), ("brief", BRIEF), ("other", OTHER)) for ask in asks]


@pytest.mark.parametrize(
    ("checkpoint", "ask"),
    [pytest.param(*case, marks=() if case in EVERYWHERE[: len(ASKS) : 3] else pytest.mark.slow) for case in EVERYWHERE],
)
def test_an_answer_equals_the_references(pipeline: Callable[[str], Qwen3Chain], checkpoint: str, ask: Ask) -> None:
    ours = pipeline(checkpoint)
    ours.check(ask, *ours.answers([ask]))


@pytest.mark.slow
def test_the_cases_cover_every_kind_of_ending(pipeline: Callable[[str], Qwen3Chain]) -> None:
    answers = [(ask, pipeline(checkpoint).expected(ask)) for checkpoint, ask in EVERYWHERE]
    for media in (True, False):
        these = [(a, e) for a, e in answers if bool(a.audio or a.image or a.video) is media and e.crash is None]
        cut = [len(answer.ids) == ask.max_tokens for ask, answer in these]
        assert any(cut), "some texts reach their limit"
        assert not all(cut), "some texts end by themselves"
        assert any(len(answer.codes) == ask.max_frames - 1 and not answer.talker_ended for ask, answer in these)
        assert any(0 < len(answer.codes) < len(answer.ids) and answer.talker_ended for _, answer in these), (
            "speech ends before the text"
        )
        assert any(len(answer.codes) > len(answer.ids) and answer.talker_ended for _, answer in these), (
            "speech ends later"
        )
        assert len({tuple(answer.ids) for _, answer in these}) > len(these) / 2


@pytest.mark.parametrize(
    ("checkpoint", "ask", "crash"),
    [
        pytest.param("brief", Ask("hello how are you today ?", SYSTEM), "thinker", marks=pytest.mark.slow),
        pytest.param("brief", Ask("tell me"), "thinker", marks=pytest.mark.slow),
        pytest.param("brief", Ask("today"), "talker", marks=pytest.mark.slow),
        pytest.param("brief", Ask("are bird", SYSTEM, speaker="chelsie"), "talker", marks=pytest.mark.slow),
        ("wordy", Ask(STORY, max_tokens=1), "thinker"),
        ("wordy", Ask(STORY, max_frames=1), "talker"),
        ("wordy", Ask("what is it ?", image=((64, 64),), max_tokens=1), "thinker"),
    ],
)
def test_if_the_reference_crashes_the_text_is_right_and_there_is_no_sound(
    pipeline: Callable[[str], Qwen3Chain], checkpoint: str, ask: Ask, crash: str
) -> None:
    ours = pipeline(checkpoint)
    assert ours.expected(ask).crash == crash
    (result,) = ours.answers([ask])
    ours.check(ask, result)
    assert result.wave.shape == (0,)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_sixteen_concurrent_requests_are_answered_as_each_alone(
    pipeline: Callable[[str], Qwen3Chain], seed: int
) -> None:
    """There are fewer rows than requests: requests join when others leave, and prefill chunks alternate."""
    order = random.Random(seed)
    asks, ours = sixteen(order), pipeline("wordy")
    for ask, result in zip(asks, ours.answers(asks, order if seed else None), strict=True):
        ours.check(ask, result)


@pytest.mark.slow
def test_a_long_answer_sounds_like_the_references_chunked_decode(
    pipeline: Callable[[str], Qwen3Chain], open_stage: Callable[..., Any]
) -> None:
    """The answer takes two chunks of the reference's 300 frames. ``check`` compares its streamed form."""
    ours, ask = pipeline("endless"), Ask(STORY, max_tokens=5, max_frames=312)
    (result,) = ours.answers([ask])
    ours.check(ask, result)
    expected = ours.expected(ask)
    assert len(expected.codes) == 311
    assert np.abs(expected.wave).max() > 0.05
    with closing(open_stage("qwen3_code2wav", ours.directory, decode="reference")) as engine:
        driver = Driver(engine)
        driver.start(1, ("talker",))
        for frame in result.codes:
            driver.feed(1, {}, {"codes": frame[None]}, source="talker")
        driver.feed(1, last=True, source="talker")
        sound = [output.tensors["audio"] for output in driver.run()[1] if output.tensors]
    assert_same_sound(np.concatenate(sound), expected.wave)
