"""The simulated player of speech: when a listener hears a gap, and how it reaches the metrics."""

from __future__ import annotations

import gc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from omni_actors import OmniSystem
from omni_actors.generation import Generation
from omni_actors.playback import BUDGET_S, Playback
from tests.support.served_engines import WORD_S


def test_sound_in_time_makes_no_gap() -> None:
    playback = Playback()
    assert [playback.feed(at, 0.5) for at in (10.0, 10.3, 10.9)] == [0.0, 0.0, 0.0]
    assert playback.ahead_s(11.0) == pytest.approx(10.1 + 1.5 - 11.0)
    assert not playback.is_silent(11.0)
    assert (playback.underruns, playback.silence_s) == (0, 0.0)


def test_a_chunk_within_the_budget_is_no_underrun() -> None:
    playback = Playback()
    playback.feed(0.0, 0.5)
    assert playback.feed(0.5 + BUDGET_S - 0.001, 0.5) == 0.0


def test_late_sound_is_a_gap_after_which_the_player_collects_again() -> None:
    playback = Playback()
    playback.feed(0.0, 0.5)  # played until 0.6
    assert playback.is_silent(1.0)
    assert playback.ahead_s(1.0) == pytest.approx(-0.4)
    assert playback.feed(1.0, 0.5) == pytest.approx(0.5), "from 0.6 until playing goes on at 1.1"
    assert playback.feed(1.55, 0.5) == 0.0, "played until 1.6"
    assert playback.underruns == 1
    assert playback.silence_s == pytest.approx(0.5)


def test_a_stream_is_played_behind_the_one_before() -> None:
    playback = Playback(ends=11.0)
    assert playback.ahead_s(10.0) == 1.0
    assert playback.feed(10.0, 0.5) == 0.0, "played until 11.5"
    assert playback.feed(12.0, 0.5) == pytest.approx(0.5 + BUDGET_S)


def test_an_interruption_is_no_gap() -> None:
    playback = Playback()
    playback.feed(0.0, 0.5)
    playback.restart()
    assert not playback.is_silent(60.0)
    assert playback.feed(60.0, 0.5) == 0.0


@given(st.lists(st.tuples(st.floats(0, 3), st.floats(0.001, 3)), min_size=1, max_size=30))
def test_time_is_either_sound_or_silence(chunks: list[tuple[float, float]]) -> None:
    """What was played, the gaps and what is left fill the time since the player began."""
    playback, at = Playback(), 0.0
    for pause_s, duration_s in chunks:
        at += pause_s
        playback.feed(at, duration_s)
    began = chunks[0][0] + BUDGET_S
    sound_s = sum(duration_s for _, duration_s in chunks)
    assert began + sound_s + playback.silence_s == pytest.approx(at + playback.ahead_s(at))


PIPELINE = """\
name: speaker
stages:
  mouth:
    {engine: "tests.support.served_engines:Speaker", accepts: [script], emits: audio, options: {step_s: STEP_S}}
"""


@asynccontextmanager
async def speaker(folder: Path, step_s: float) -> AsyncIterator[OmniSystem]:
    """A pipeline that needs ``step_s`` for each word, and speaks it in 0.2 s."""
    path = folder / "speaker.yaml"
    path.write_text(PIPELINE.replace("STEP_S", str(step_s)))
    async with OmniSystem.open(path) as omni:
        yield omni


@pytest.mark.slow
async def test_a_slow_speaker_underruns_and_the_metrics_tell(tmp_path: Path) -> None:
    """A word lasts WORD_S, and the next one comes later than that and the budget together."""
    async with speaker(tmp_path, WORD_S + 6 * BUDGET_S) as omni:
        generation = omni.generate(script="one two three")
        found, heard = [], []
        async for output in generation:
            found.append((output.metrics, sample(omni, "streams")))
            heard += [each.underruns for each in omni.live_state().requests.values()]
        assert sorted({*heard}) == [0, 1, 2], "the live state has them while the sound is read"
        metrics = found[-1][0]
        assert metrics is not None
        assert metrics.underruns == 2
        assert metrics.gap_s > 2 * BUDGET_S
        assert [each.underruns for each in omni.live_state().requests.values()] == [2]
        assert sample(omni, "underruns_total") == sample(omni, "gap_seconds_count") == 2
        assert (found[0][1], sample(omni, "streams")) == (1, 0)


async def read_without_gaps(generation: Generation) -> None:
    metrics = [output.metrics async for output in generation][-1]
    assert metrics is not None
    assert (metrics.underruns, metrics.gap_s) == (0, 0.0)


async def test_only_a_listener_s_time_counts(tmp_path: Path) -> None:
    """An answer that is collected has no gaps, and one that is played at a hundredth of its speed has none here."""
    async with speaker(tmp_path, WORD_S + 6 * BUDGET_S) as omni:
        collected, whole, slow = (omni.generate(script="one two") for _ in range(3))
        whole.stream.relay(whole=True)
        slow.played_at = 0.01
        async with trio.open_nursery() as nursery:
            for generation in (whole, slow):
                nursery.start_soon(read_without_gaps, generation)
            assert (await collected.collect()).audio is not None
        assert sample(omni, "underruns_total") == sample(omni, "streams") == 0


async def test_a_stream_that_was_aborted_or_dropped_is_not_open(tmp_path: Path) -> None:
    async with speaker(tmp_path, 0.01) as omni:
        aborted, dropped = (omni.generate(script="word " * 1000) for _ in range(2))
        for generation in (aborted, dropped):
            await anext(generation)
        assert sample(omni, "streams") == 2
        aborted.abort()
        del dropped, generation
        gc.collect()
        assert sample(omni, "streams") == 0


def sample(omni: OmniSystem, name: str) -> float:
    value = omni.metrics.registry.get_sample_value(f"omni_speech_{name}")
    assert value is not None
    return value
