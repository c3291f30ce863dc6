"""Thinker, talker and token2wav against transformers' ``generate``: the same tokens, codes and samples.

The engines are driven as engine loops drive them: each output is fed to the downstream engine at once, and a stage that
has ended takes no more. A token is identified by its row for the talker: no two tokens have similar rows.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from tests.support.omni_questions import STORY, SYSTEM, Ask
from tests.support.qwen2_5_chain import Qwen25Chain
from tiny_models import qwen2_5 as tiny

# They need the libraries of the extra. The weights are random.
pytestmark = [pytest.mark.voice, pytest.mark.usefixtures("clear_choices")]

CHECKPOINTS: dict[str, dict[str, Any]] = {
    "wordy": {"seed": 1},
    "brief": {"seed": 2, "text_eos": 2.0, "codec_eos": 1.1},
}
OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "wordy": ({"prefill_chunk": 16, "max_batch": 5}, {"prefill_chunk": 7, "max_batch": 6}),
}
"""The options of the thinker and of the talker."""


@pytest.fixture(scope="module")
def pipeline(
    open_stage: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., Qwen25Chain]]:
    """Return a function from a checkpoint's name and the talker's options to the pipeline. Equal engines are shared."""
    with ExitStack() as stack:

        @functools.cache
        def open_engine(*args: Any, **options: Any) -> Any:
            return stack.enter_context(closing(open_stage(*args, **options)))

        @functools.cache
        def saved(name: str) -> Path:
            return tiny.save(tmp_path_factory.mktemp(name), **CHECKPOINTS[name])

        @functools.cache
        def get(name: str, **talker: Any) -> Qwen25Chain:
            options = OPTIONS.get(name, ({}, {}))
            return Qwen25Chain(saved(name), open_engine, (options[0], options[1] | talker))

        yield get


ASKS = [
    Ask("hello", speaker="Chelsie"),
    Ask("hello", SYSTEM, speaker="Ethan"),
    Ask(STORY, max_tokens=40, max_frames=50, speaker="Chelsie"),
    Ask(STORY, SYSTEM, max_tokens=7, max_frames=9, speaker="Ethan"),
    Ask("and you ?", earlier=("who is there ?", "it is me, the assistant"), speaker="Chelsie"),
    Ask("what did you hear ?", audio=(1.7,), speaker="Ethan"),
    Ask("what is in this picture ?", image=((96, 64),), speaker="Chelsie"),
    Ask("what did you hear and see ?", SYSTEM, audio=(1.7, 0.6), image=((64, 64), (96, 128)), speaker="Ethan"),
    Ask("what happens ?", audio=(0.4,), video=4, speaker="Chelsie"),
    Ask("what do they say ?", SYSTEM, video=6, use_audio_in_video=True, speaker="Ethan"),
]
EVERYWHERE = [(name, ask) for name in ("wordy", "brief") for ask in ASKS]


@pytest.mark.parametrize(
    ("checkpoint", "ask"),
    [pytest.param(*case, marks=() if case in EVERYWHERE[: len(ASKS) : 3] else pytest.mark.slow) for case in EVERYWHERE],
)
def test_an_answer_equals_the_references(pipeline: Callable[..., Qwen25Chain], checkpoint: str, ask: Ask) -> None:
    ours = pipeline(checkpoint)
    ours.check(ask, *ours.answers([ask]))


@pytest.mark.slow
def test_the_cases_cover_every_kind_of_ending(pipeline: Callable[..., Qwen25Chain]) -> None:
    answers = [(ask, pipeline(checkpoint).expected(ask)) for checkpoint, ask in EVERYWHERE]
    for media in (True, False):
        these = [(a, e) for a, e in answers if bool(a.audio or a.image or a.video) is media and e.crash is None]
        cut = [len(answer.ids) == ask.max_tokens for ask, answer in these]
        assert any(cut), "some texts reach their limit"
        assert not all(cut), "some texts end by themselves"
        assert any(len(answer.codes) == ask.max_frames and not answer.talker_ended for ask, answer in these)
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
        ("wordy", Ask("more", speaker="Ethan"), "thinker"),
        ("wordy", Ask("go", SYSTEM, speaker="Chelsie"), "talker"),
        pytest.param("brief", Ask("hi", speaker="Chelsie"), "talker", marks=pytest.mark.slow),
        ("wordy", Ask(STORY, max_tokens=1, speaker="Ethan"), "thinker"),
        ("wordy", Ask("what is it ?", image=((64, 64),), max_tokens=1, speaker="Ethan"), "thinker"),
    ],
)
def test_if_the_reference_crashes_the_text_is_right_and_there_is_no_sound(
    pipeline: Callable[..., Qwen25Chain], checkpoint: str, ask: Ask, crash: str
) -> None:
    ours = pipeline(checkpoint)
    assert ours.expected(ask).crash == crash
    (result,) = ours.answers([ask])
    ours.check(ask, result)
    assert result.wave.shape == (0,)


@pytest.mark.parametrize("ask", [ASKS[1], ASKS[4], ASKS[7], ASKS[8], ASKS[9]])
@pytest.mark.slow
def test_with_the_trained_prompt_answers_equal_the_references_for_a_padded_prompt(
    pipeline: Callable[..., Qwen25Chain], ask: Ask
) -> None:
    ours = pipeline("wordy", prompt="trained")
    (result,) = ours.answers([ask])
    ours.check(ask, result, padded=True)
    assert result.codes.tolist() != ours.expected(ask).codes.tolist(), "the prompt makes a difference"


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_sixteen_concurrent_requests_are_answered_as_each_alone(
    pipeline: Callable[..., Qwen25Chain], seed: int
) -> None:
    """There are fewer rows than requests: requests join when others leave, and prefill chunks alternate."""
    order = random.Random(seed)
    short = [ASKS[0]._replace(max_tokens=1), ASKS[5]._replace(max_tokens=5), ASKS[6]._replace(max_frames=1)]
    asks = [order.choice([*ASKS, *short]) for _ in range(16)]
    ours = pipeline("wordy")
    for ask, result in zip(asks, ours.answers(asks, order if seed else None), strict=True):
        ours.check(ask, result)
