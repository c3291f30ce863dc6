"""The benchmark of recovery kills workers, and measures what their death adds to the answer."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.recovery import COLD, TAKEOVERS, UNDISTURBED, Heard, added_s

ROOT = Path(__file__).parents[2]


def figures(file: Path, *arguments: str) -> dict[str, list[dict[str, Any]]]:
    """Run the benchmark and return what it wrote. It may find that a bound is not held on a busy machine."""
    program = [sys.executable, "-m", "bench.recovery", *arguments, "--json", str(file)]
    subprocess.run(program, cwd=ROOT, check=False, capture_output=True)
    written: dict[str, list[dict[str, Any]]] = json.loads(file.read_text())
    return written


@pytest.mark.slow
def test_a_quick_run_measures_a_death_with_each_takeover(tmp_path: Path) -> None:
    rows = {(row["stage"], row["takeover"]): row for row in figures(tmp_path / "figures.json", "--quick")["silence"]}
    assert rows.keys() == {(stage, takeover) for stage in (UNDISTURBED, "middle") for takeover in TAKEOVERS}
    assert all(len(row["added_s"]) == len(row["underrun_s"]) == 1 for row in rows.values())
    assert rows["middle", COLD]["added_s"][0] > 0.05, "the start of a worker takes longer"


@pytest.mark.voice
@pytest.mark.exhaustive
def test_resuming_and_repeating_are_timed_until_the_next_token(tmp_path: Path) -> None:
    rows = figures(tmp_path / "figures.json", "--only", "tokens", "--rounds", "1", "--tokens", "2,4")["tokens"]
    assert [(row["tokens"], row["mode"]) for row in rows] == [
        (tokens, mode) for tokens in (2, 4) for mode in ("resume", "repeat")
    ]
    assert all(row["next_s"][0] > 0 for row in rows)


def heard(*sound: tuple[float, float]) -> Heard:
    return Heard(list(sound))


def test_a_player_is_silent_until_the_late_chunk_arrives() -> None:
    assert heard((0.0, 1.0), (0.5, 1.0), (2.5, 1.0), (3.0, 1.0)).underrun_s == 0.5
    assert heard((7.0, 0.5), (7.1, 0.5)).underrun_s == 0.0


def test_the_silence_added_is_the_largest_excess_of_one_pause() -> None:
    usual = [heard((0.0, 1.0), (2.0, 1.0), (2.5, 1.0)), heard((1.0, 1.0), (3.0, 1.0), (3.5, 1.0))]
    assert added_s(heard((0.0, 1.0), (2.0, 1.0), (3.5, 1.0)), usual) == 1.0, "though a pause of 2.0 s is usual"
