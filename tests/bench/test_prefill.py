"""The benchmark of long prompts, in one stage and in two."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.prefill import ONE, TWO, compared, summary

ROOT = Path(__file__).parents[2]
QUICK = ("--rounds", "1", "--window-s", "4", "--prompt", "200", "--no-lengths")


def row(gap: float, first: float, text: str) -> dict[str, object]:
    return {"gaps_s": [gap] * 200, "alone_s": [0.05], "first_token_s": [first], "texts": {1: text}}


def test_ratios_are_those_of_windows_that_follow_one_another() -> None:
    found = {ONE: [row(0.4, 2.0, "a"), row(0.8, 2.0, "b")], TWO: [row(0.1, 3.0, "a"), row(0.2, 3.0, "c")]}
    assert compared(found) == {"gap_p99": 0.25, "first_token": 1.5, "equal": 1, "answers": 2}
    assert summary(found[ONE])["gap_max"] == 0.8
    assert summary(found[TWO])["prompts"] == 2


@pytest.mark.exhaustive
@pytest.mark.voice
def test_a_quick_run_measures_both(tmp_path: Path) -> None:
    """It may find that the bound is not met on a busy machine."""
    file = tmp_path / "figures.json"
    program = [sys.executable, "-m", "bench.prefill", *QUICK, "--json", str(file)]
    subprocess.run(program, cwd=ROOT, check=False, capture_output=True)
    figures = json.loads(file.read_bytes())
    assert figures["ratio"]["answers"] >= 1
    assert figures["figures"].keys() == {ONE, TWO}
