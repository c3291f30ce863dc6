"""The table's arithmetic, and the samples of a soak."""

from __future__ import annotations

import math
import os
import random
import subprocess
from types import SimpleNamespace

import pytest
import trio

from omni_actors.stress.judge import Violation
from omni_actors.stress.report import Row, Tally, Timing, percentile
from omni_actors.stress.soak import Slope, Soak, _sample, slope


def test_a_percentile_is_a_measured_value() -> None:
    hundred = [float(n) for n in range(100, 0, -1)]
    assert [percentile(hundred, p) for p in (1, 50, 99, 100)] == [1.0, 50.0, 99.0, 100.0]
    assert percentile([7.0], 99) == 7.0
    assert percentile([1.0, 2.0], 50) == 1.0
    assert percentile([], 50) is None


def test_only_the_recovery_is_reduced_by_the_load_time() -> None:
    assert Timing(recovered_s=3.0, load_s=2.5).recovered_less_load_s == 0.5
    assert Timing(recovered_s=3.0).recovered_less_load_s == 3.0
    assert Timing(detected_s=1.0).recovered_less_load_s is None


def test_the_table_adds_up_and_bounds_its_zeros() -> None:
    one, other = Tally(runs=1), Tally(runs=2)
    one.rows["SIGKILL", "full"] = Row(2, [Timing(0.004, 0.3, 0.4, 0.1), Timing(0.006, None, None, None)])
    one.rows["SIGKILL", "full"].resumed += 2
    one.rows["SIGKILL", "full"].promotions += 3
    other.rows["SIGKILL", "full"] = Row(1, resumed=1, repeated=4, promotions=2)
    other.rows["SIGSTOP", "idle"] = Row(1)
    other.violated("SIGSTOP", "idle", Violation("lost", "an output"))
    one.requests["completed"] += 5
    one.add(other)
    assert (one.runs, one.faults, len(one.found), one.requests["completed"]) == (3, 4, 1, 5)
    header, _, kill, stop, everything = one.as_markdown().splitlines()
    cells = dict(zip(_cells(header), _cells(kill), strict=True))
    assert cells["detected p50 / p99"] == "4.0 ms / 6.0 ms"
    assert cells["recovered p50 / p99"] == "400 ms / 400 ms"
    assert cells["… less model load"] == "300 ms / 300 ms"
    assert (cells["N"], cells["3/N"], cells["lost"]) == ("3", "1", "0")
    assert (cells["resumed"], cells["repeated"], cells["promotions"]) == ("3", "4", "5")
    cells = dict(zip(_cells(header), _cells(stop), strict=True))
    assert (cells["lost"], cells["3/N"], cells["detected p50 / p99"]) == ("1", "3", "–")
    assert _cells(everything)[:4] == ["**all**", "", "4", "1"]
    figures = one.as_json()
    assert figures["bound"] == 0.75
    assert [row["faults"] for row in figures["rows"]] == [3, 1]
    assert [(row["resumed"], row["repeated"], row["promotions"]) for row in figures["rows"]] == [(3, 4, 5), (0, 0, 0)]
    assert figures["rows"][0]["samples"]["detected_s"] == [0.004, 0.006]


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_a_slope_lies_within_a_few_of_its_errors_of_the_truth() -> None:
    noise = random.Random(1)
    for true_slope in (0.0, 5000.0):
        drift, samples = 0.0, []
        for second in range(600):
            drift = 0.8 * drift + noise.gauss(0, 10_000)  # what lingers makes samples less than independent
            samples.append((float(second), 1e8 + true_slope * second / 60 + drift))
        found = slope(samples)
        assert abs(found.per_minute - true_slope) < 4 * found.error
        assert 0 < found.error < 20_000


def test_a_heap_that_levels_off_has_no_slope_in_the_second_half() -> None:
    step = [(float(n), 1e6 * (n >= 40)) for n in range(100)]
    assert slope(step).per_minute > 0
    assert slope(step, 0.5) == Slope(0.0, 0.0)


def test_no_slope_of_two_samples() -> None:
    assert math.isnan(slope([(0.0, 1.0), (1.0, 2.0)]).per_minute)
    assert slope([(float(n), 60.0 * n) for n in range(10)]).per_minute == pytest.approx(3600)


def test_a_soak_skips_a_worker_that_has_ended_and_that_health_still_names() -> None:
    with subprocess.Popen(["true"]) as reaped, subprocess.Popen(["true"]) as zombie:
        reaped.wait()
        os.waitid(os.P_PID, zombie.pid, os.WEXITED | os.WNOWAIT)  # it is not reaped before the block is left
        pids = enumerate((reaped.pid, zombie.pid, os.getpid()))
        health = SimpleNamespace(stages={"spared": [SimpleNamespace(replica=number, pid=pid) for number, pid in pids]})
        soaked = Soak(1.0, "spared")

        async def look_once() -> None:
            with trio.CancelScope() as scope:
                scope.cancel()  # takes effect at the first wait
                await _sample(SimpleNamespace(health=lambda: health), soaked)

        trio.run(look_once)
    assert sorted(soaked.rss) == ["parent", "spared.2"]
    assert all(size > 0 for [(_, size)] in soaked.rss.values())
