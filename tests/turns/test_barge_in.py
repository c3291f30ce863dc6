"""What speech does to the answer that is being played."""

from __future__ import annotations

import numpy as np
import pytest

from bench.turns import RATE, say
from omni_actors import turns
from omni_actors.turns import BargeIn, Decision, SpeechStarted, SpeechStopped
from omni_actors.turns.barge_in import LONGEST_MS


def test_speech_cuts_an_answer_at_once() -> None:
    barge_in = BargeIn()
    assert barge_in.started(SpeechStarted(700, 1000), playing=True, heard=True) is Decision.CUT
    assert barge_in.advanced(5000) is None
    assert barge_in.stopped(SpeechStopped(1900, 1400)) == [Decision.TURN]


def test_speech_cuts_nothing_while_nothing_plays() -> None:
    barge_in = BargeIn(ignores_backchannels=True)
    assert barge_in.started(SpeechStarted(700, 1000), playing=False, heard=False) is None
    assert barge_in.advanced(9000) is None
    assert barge_in.stopped(SpeechStopped(1700, 1100)) == [Decision.TURN]


@pytest.mark.parametrize("ignores_backchannels", [False, True])
def test_speech_cuts_nothing_if_it_may_not_interrupt(ignores_backchannels: bool) -> None:
    barge_in = BargeIn(interrupts=False, ignores_backchannels=ignores_backchannels)
    assert barge_in.started(SpeechStarted(700, 1000), playing=True, heard=True) is None
    assert barge_in.advanced(9000) is None
    assert barge_in.stopped(SpeechStopped(9000, 8500)) == [Decision.TURN]


@pytest.mark.parametrize("interrupts", [False, True])
def test_the_end_of_a_turn_cuts_an_answer_that_has_begun_meanwhile(interrupts: bool) -> None:
    barge_in = BargeIn(interrupts=interrupts)
    assert barge_in.started(SpeechStarted(700, 1000), playing=False, heard=False) is None
    decisions = [Decision.CUT, Decision.TURN] if interrupts else [Decision.TURN]
    assert barge_in.stopped(SpeechStopped(1900, 1400), answering=True) == decisions


def test_short_speech_is_a_backchannel() -> None:
    barge_in = BargeIn(ignores_backchannels=True)
    for begin in (1000, 5000):
        assert barge_in.started(SpeechStarted(begin - 300, begin), playing=True, heard=True) is None
        assert barge_in.advanced(begin + LONGEST_MS - 1) is None
        stopped = SpeechStopped(begin + LONGEST_MS + 400, begin + LONGEST_MS - 1)
        assert barge_in.stopped(stopped) == [Decision.BACKCHANNEL]


def test_speech_that_is_forgotten_is_not_judged() -> None:
    barge_in = BargeIn(ignores_backchannels=True)
    barge_in.started(SpeechStarted(700, 1000), playing=True, heard=True)
    assert barge_in.is_undecided
    barge_in.reset()
    assert not barge_in.is_undecided
    assert barge_in.advanced(9000) is None


def test_short_speech_cuts_an_answer_that_is_only_computed() -> None:
    barge_in = BargeIn(ignores_backchannels=True)
    assert barge_in.started(SpeechStarted(700, 1000), playing=True, heard=False) is Decision.CUT
    assert not barge_in.is_undecided
    assert barge_in.stopped(SpeechStopped(1700, 1100)) == [Decision.TURN]


def test_long_speech_cuts_as_soon_as_it_is_long() -> None:
    barge_in = BargeIn(ignores_backchannels=True)
    assert barge_in.started(SpeechStarted(700, 1000), playing=True, heard=True) is None
    assert barge_in.advanced(1000 + LONGEST_MS) is Decision.CUT
    assert barge_in.advanced(1100 + LONGEST_MS) is None
    assert barge_in.stopped(SpeechStopped(4000, 3500)) == [Decision.TURN]


def test_long_speech_in_one_chunk_cuts_and_is_a_turn() -> None:
    barge_in = BargeIn(ignores_backchannels=True)
    assert barge_in.started(SpeechStarted(700, 1000), playing=True, heard=True) is None
    assert barge_in.stopped(SpeechStopped(4000, 3500)) == [Decision.CUT, Decision.TURN]


@pytest.mark.voice
@pytest.mark.parametrize(
    ("text", "decisions"),
    [
        ("Yeah.", [Decision.BACKCHANNEL]),
        ("Mm-hm.", [Decision.BACKCHANNEL]),
        ("No, that is not what I meant.", [Decision.CUT, Decision.TURN]),
        ("Mm-hm, but what about tomorrow?", [Decision.CUT, Decision.TURN]),
    ],
)
def test_a_spoken_backchannel_is_told_from_a_spoken_interruption(text: str, decisions: list[Decision]) -> None:
    sound = np.concatenate([np.zeros(RATE, np.float32), say(text), np.zeros(RATE, np.float32)])
    detector, barge_in = turns.open_detector(turns.ServerVad()), BargeIn(ignores_backchannels=True)
    found: list[Decision | None] = []
    for at in range(0, len(sound), 320):
        for event in detector.feed(sound[at : at + 320]):
            if isinstance(event, SpeechStarted):
                found.append(barge_in.started(event, playing=True, heard=True))
            elif isinstance(event, SpeechStopped):
                found += barge_in.stopped(event)
        found.append(barge_in.advanced(detector.spoken_until_ms))
    assert [decision for decision in found if decision is not None] == decisions
