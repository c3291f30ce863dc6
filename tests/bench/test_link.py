"""The benchmark of links judges its figures, and runs where namespaces can be made."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from bench.link.__main__ import cell, ring_trips, targets
from bench.link.measure import ECHO_SIZES, STREAM_SIZES, Figures
from bench.link.transports import Bare, Link, RingAlone

ROOT = Path(__file__).parents[2]


def figures(rate: float, trip_s: float) -> Figures:
    return Figures(
        dict.fromkeys(STREAM_SIZES, rate), dict.fromkeys(STREAM_SIZES, 1.0), dict.fromkeys(ECHO_SIZES, trip_s)
    )


def test_bounds_compare_within_a_round() -> None:
    """A round in which all is slow changes no ratio."""
    rounds = [
        {Bare.name: figures(2e9 / slow, 10e-6 * slow), Link.name: figures(1e9 / slow, 60e-6 * slow)}
        for slow in (1, 5, 1)
    ]
    found = targets(rounds)
    assert [(target.ratio, target.met) for target in found] == [
        (pytest.approx(0.5), True),
        (pytest.approx(6.0), False),
        (pytest.approx(6.0), False),
    ]


def test_a_round_trip_is_compared_with_its_parts_and_what_is_missing_is_a_dash() -> None:
    measured = {Bare.name: figures(1.0, 10e-6), RingAlone.name: figures(1.0, 20e-6), Link.name: figures(1.0, 100e-6)}
    assert ring_trips([measured], 64) == pytest.approx(2.0)
    assert cell([measured], Link.name, lambda each: each.bytes_per_s[1], "B/s") == "-"
    assert cell([measured], Link.name, lambda each: each.round_trip_s[64] * 1e6, "µs") == "100 µs (10.00)"


@pytest.mark.slow
@pytest.mark.usefixtures("needs_namespaces")
def test_a_short_run_measures_every_transport(tmp_path: Path) -> None:
    written = tmp_path / "figures.json"
    command = [sys.executable, "-m", "bench.link", "--rounds", "1", "--seconds", "0.02", "--without-ray"]
    done = subprocess.run(
        [*command, "--json", str(written)], cwd=ROOT, capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode in (0, 1), done.stderr
    figures = json.loads(written.read_text())
    (measured,) = figures["rounds"]
    assert {Bare.name, Link.name, RingAlone.name} <= measured.keys()
    for each in measured.values():
        assert len(each["bytes_per_s"]) == len(STREAM_SIZES)
        assert all(value > 0 for kind in each.values() for value in kind.values())
    if shutil.which("iperf3") is not None:
        assert all(value > 0 for value in figures["iperf3"].values())
