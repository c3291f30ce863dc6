"""The benchmark of realtime sessions is answered while stages die, talks over answers, and finds ends of turns."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from bench import turns
from bench.realtime import barge_in, end_of_turn, kills
from bench.realtime.user import RATE, Answer, Spoken, Underrun

ROOT = Path(__file__).parents[2]
QUICK = (
    *("--sessions", "2", "--seconds", "15", "--every", "6", "--variant", "cold restart"),
    *("--interruptions", "2", "--sentences", "2"),
)


@pytest.mark.voice
@pytest.mark.slow
@pytest.mark.timeout(600)  # two servers load in it
def test_a_quick_run_loses_no_session_and_has_every_figure(tmp_path: Path) -> None:
    """It may find that a bound is not met on a busy machine."""
    file = tmp_path / "figures.json"
    program = [sys.executable, "-m", "bench.realtime", *QUICK, "--json", str(file)]
    done = subprocess.run(program, cwd=ROOT, check=False, stderr=subprocess.PIPE, text=True)
    assert file.exists(), f"exit code {done.returncode}: {done.stderr}"
    found = json.loads(file.read_bytes())
    [run] = found["kills"]
    assert [death["stage"] for death in run["deaths"]] == list(kills.STAGES[:2])
    assert all(0 < death["load_s"] < math.inf for death in run["deaths"])
    assert (run["lost"], run["errors"]) == ([], [])
    assert {each["session"] for each in run["asked"]} == {0, 1}
    assert {each["status"] for each in run["asked"]} <= {"completed", "incomplete"}
    assert all(each["answer"] and each["sound_s"] > 0.5 for each in run["asked"])
    for each in found["barge_in"]:
        assert 0 < each["stopped_s"] <= each["done_s"]
        assert each["played_s"] > 0
    assert [each["detection"] for each in found["end_of_turn"]] == 3 * ["server_vad"] + 3 * ["semantic_vad"]
    assert all(len(each["ends_s"]) + each["wrong"] == 2 for each in found["end_of_turn"])


def sound(seconds: float) -> bytes:
    return bytes(2 * round(RATE * seconds))


def test_a_player_that_waits_for_sound_underruns_when_it_has_played_everything() -> None:
    answer = Answer()
    answer.hear(10.0, sound(1.0))
    answer.hear(11.05, sound(1.0))
    assert answer.underruns == []
    answer.hear(13.0, sound(0.5))
    [underrun] = answer.underruns
    assert underrun.at == pytest.approx(12.1), "it began 0.1 s after the first sound"
    assert underrun.gap_s == pytest.approx(1.0)
    assert (answer.first_s, answer.last_s, answer.heard_s) == (10.0, 13.0, 2.5)
    assert [answer.played_s(at) for at in (13.1, 13.2, 20.0)] == pytest.approx([2.0, 2.1, 2.5])


def test_an_underrun_belongs_to_a_death_if_it_begins_before_the_stage_serves_again() -> None:
    death = kills.Death("llm", at=100.0, load_s=5.0)
    begins = (99.9, 100.1, 105.0 + kills.LATEST_S, 105.1 + kills.LATEST_S)
    assert [death.explains(Underrun(at, 1.0)) for at in begins] == [False, True, True, False]


def test_words_that_were_not_recognized_get_times_from_their_neighbours() -> None:
    timed = [(" The", 0.2), (" quick", 0.6), (" socks", 1.0), (" jumps,", 1.4), (" over.", 1.8)]
    assert barge_in.word_times("The quick fox jumps over it.", timed) == [0.2, 0.6, 1.0, 1.4, 1.8, math.inf]
    assert barge_in.word_times("Not a word of it", []) == [math.inf] * 5


def test_sentences_that_are_cut_missed_or_found_too_soon_are_wrong() -> None:
    silence = np.zeros(0, np.float32)
    conversation = turns.Conversation(
        silence, [(2000.0 + 5000 * number, 5000.0 + 5000 * number) for number in range(4)]
    )
    started = [(at, None) for at in (102.1, 107.1, 108.0, 112.1)]
    stopped = [(at, SimpleNamespace(audio_end_ms=1000 * at - 92_600)) for at in (105.5, 107.9, 110.5, 114.9)]
    heard = end_of_turn.Heard("server_vad", None, [], [], [], 0)
    found = end_of_turn.compare(heard, Spoken(100.0, 122.0, 7.5), conversation, started, stopped)
    assert found.wrong == 3
    assert found.starts_s == pytest.approx([0.1])
    assert found.ends_s == pytest.approx([0.5])
    assert found.positions_s == pytest.approx([0.4])
