"""The benchmark of whole requests runs, names peers that are not installed, and traces a request."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.pipeline.load import Cell, Failure, Meter, Plan, Sample, measure
from bench.pipeline.report import Figures, bounds

ROOT = Path(__file__).parents[2]


def command(*arguments: str) -> str:
    """Run the benchmark and return what it printed."""
    environment = {**os.environ, "COLUMNS": "150"}
    program = [sys.executable, "-m", "bench.pipeline", "--quick", *arguments]
    return subprocess.run(program, cwd=ROOT, env=environment, check=True, capture_output=True, text=True).stdout


@pytest.mark.slow
def test_a_quick_run_measures_ours_and_the_bare_queues(tmp_path: Path) -> None:
    written = tmp_path / "figures.json"
    command("--only", "ours", "--only", "Queue", "--json", str(written))
    samples = json.loads(written.read_text())["samples"]
    assert {(each["name"], each["in_flight"], each["size"]) for each in samples} == {
        (name, in_flight, 1024) for name in ("ours", "multiprocessing.Queue") for in_flight in (1, 16)
    }
    for each in samples:
        (sample,) = each["samples"]
        assert 0 < sample["p50_s"] <= sample["p99_s"]
        assert sample["per_s"] > 0
        assert sample["cpu_s"] >= sample["parent_cpu_s"]


@pytest.mark.slow
def test_the_trace_shows_every_point_of_all_stages() -> None:
    printed = command("--trace")
    for stage in ("first", "second", "third"):
        for point in ("Start posted", "Start handled", "chunk received", "output made", "finished"):
            assert f"{stage}: {point}" in printed
    assert "first: Start written" in printed
    assert "the client has the output" in printed


class Broken:
    name = "broken"

    def __init__(self, error: Exception) -> None:
        self._error = error

    def run(self, meter: Meter) -> None:
        raise self._error


def test_a_contender_that_cannot_run_is_named_with_the_reason() -> None:
    for error, reason in (
        (ImportError("no", name="absent"), "not installed: absent"),
        (ValueError("odd"), "ValueError: odd"),
    ):
        assert measure(Broken(error), Cell(1, 8), Plan()) == Failure(reason)


def sample(p50_s: float, per_s: float) -> Sample:
    return Sample(p50_s=p50_s, p99_s=1.0, per_s=per_s, parent_cpu_s=0.0, cpu_s=0.0, idle_cpu=0.0)


def judged(figures: Figures, size: int, in_flight: list[int]) -> list[bool]:
    found = bounds(figures, [size], in_flight, ours="ours", peers={"queue"}, reference="queue")
    return [bound.met for bound in found]


def test_the_bounds_are_judged_by_the_medians() -> None:
    figures = Figures()
    for p50_s in (0.001, 0.0011, 5.0):
        figures.add("ours", Cell(1, 1024), sample(p50_s, 900.0))
    figures.add("queue", Cell(1, 1024), sample(0.0003, 3000.0))
    figures.add("ours", Cell(64, 1024), sample(0.1, 5000.0))
    figures.add("ours", Cell(10_000, 1024), sample(0.1, 2500.0))
    assert judged(figures, 1024, [1, 64, 10_000]) == [True, False, True, False]


def test_the_rings_alone_are_no_peer() -> None:
    figures = Figures()
    for name, per_s in (("ours", 200.0), ("our rings and trio alone", 900.0), ("queue", 100.0)):
        figures.add(name, Cell(64, 1024**2), sample(0.001, per_s))
    assert judged(figures, 1024**2, [64])[-1]
