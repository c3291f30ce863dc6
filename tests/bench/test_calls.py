"""The benchmark of calls asks systems under load, and stops a worker."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.calls import CALLS, FROZEN_CALLS, PARENTS, RATES, TIMED_OUT, checks

ROOT = Path(__file__).parents[2]
QUICK = ("--only", "qwen3_omni", "--rounds", "1", "--window-s", "0.5")


@pytest.mark.slow
def test_a_quick_run_asks_in_time_and_only_the_stopped_stage_times_out(tmp_path: Path) -> None:
    """It may find that a bound is not met on a busy machine."""
    file = tmp_path / "figures.json"
    program = [sys.executable, "-m", "bench.calls", *QUICK, "--json", str(file)]
    subprocess.run(program, cwd=ROOT, check=False, capture_output=True)
    row = json.loads(file.read_bytes())["qwen3_omni"]
    assert row["answers_s"].keys() == PARENTS.keys()
    assert all(took and min(took) >= 0 for took in row["answers_s"].values())
    assert row["frozen"]["replies"]["talker"] == {TIMED_OUT: FROZEN_CALLS}
    assert row["frozen"]["replies"].keys() == {"thinker", "talker", "code2wav"}


def test_each_bound_is_checked() -> None:
    row = {
        "answers_s": {name: [0.001] * 98 + [0.06] * 2 for name in PARENTS},
        "outputs_a_second": {RATES[0]: [(100.0, 90.0)]},
        "frozen": {"stage": "b", "others_s": 0.9, "replies": {"a": {TIMED_OUT: 1}, "b": {TIMED_OUT: FROZEN_CALLS}}},
    }
    assert not any(met for *_, met in checks("x", row))
    rates = {calls: [(100.0, 98.0 if calls == RATES[0] else 90.0)] for calls in RATES}
    row |= {"answers_s": {name: [0.001] for name in PARENTS}, "outputs_a_second": rates}
    row["frozen"] = {
        "stage": "b",
        "others_s": 0.1,
        "replies": {"a": {"value": FROZEN_CALLS}, "b": {TIMED_OUT: FROZEN_CALLS}},
    }
    assert all(met for *_, met in checks("x", row))
    assert CALLS.keys() > PARENTS.keys()
