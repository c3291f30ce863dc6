"""Tables of what was measured, and the bounds that it has to meet."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from bench.bounds import Bound, quantile
from bench.realtime.barge_in import BargeIn
from bench.realtime.end_of_turn import Heard
from bench.realtime.kills import Run
from bench.turns import END_MS

STOP_MS = 250
"""From the first sample of a barge-in to the last sound, at the 95th percentile."""
WORDS = 1
"""How many words a kept transcript may differ by from what was heard, at the 95th percentile."""


def quantiles(values_s: Sequence[float], *shares: int) -> str:
    """Return percentiles of seconds, in milliseconds: "120 / 250"."""
    return " / ".join(f"{1000 * quantile(values_s, share):.0f}" for share in shares)


def kill_bounds(run: Run) -> list[Bound]:
    """Return the bounds of one variant."""
    answered = sum(each.is_answered for each in run.asked)
    bounds = [
        Bound("sessions lost", len(run.lost), 0),
        Bound("questions without an answer", len(run.asked) - answered if run.asked else math.inf, 0),
        Bound("underruns outside of a stage's load", len(run.unexplained), 0),
    ]
    if not run.may_underrun:
        bounds.append(Bound("underruns", len(run.underruns), 0))
    return [Bound(f"{run.variant}: {each.what}", each.found, each.most) for each in bounds]


def show_kills(console: Console, run: Run) -> None:
    """Print the figures of one variant, and what went wrong in it."""
    table = Table("", run.variant)
    answered = sum(each.is_answered for each in run.asked)
    gaps = [each.gap_s for each in run.underruns]
    heard_s = sum(each.sound_s for each in run.asked)
    table.add_row("load average, before - after", " - ".join(f"{load:.1f}" for load in run.load))
    table.add_row("time, s", f"{run.lasted_s:.0f} of {run.seconds:.0f}")
    table.add_row("deaths", str(len(run.deaths)))
    table.add_row(
        "a stage serves again after, p50 / most, ms", quantiles([each.load_s for each in run.deaths], 50, 100)
    )
    table.add_row("sessions lost", str(len(run.lost)))
    table.add_row("questions answered", f"{answered} of {len(run.asked)}")
    table.add_row("answers that noise cut", str(sum(each.cuts for each in run.asked)))
    table.add_row(
        "first sound after a question, p50 / p95, ms", quantiles([each.first_s for each in run.asked], 50, 95)
    )
    table.add_row("underruns", str(len(gaps)))
    table.add_row("of them outside of a stage's load", str(len(run.unexplained)))
    table.add_row("silence / sound heard", f"{sum(gaps):.1f} s / {heard_s:.0f} s; longest {max(gaps, default=0):.2f} s")
    console.print(table)
    for underrun in run.underruns:
        console.print(escape(f"underrun of {underrun.gap_s:.2f} s: {run.cause(underrun)}"))
    problems = (*run.lost, *run.errors, *(f"{each.text} {each.outcome}" for each in run.asked if not each.is_answered))
    for problem in problems:
        console.print(escape(problem), style="red")


def barge_in_bounds(found: Sequence[BargeIn], asked: int) -> list[Bound]:
    """Return the bounds of barge-ins. asked: how many there should be."""
    return [
        Bound("barge-ins that failed", asked - len(found), 0),
        Bound("barge-in: last sound, p95", 1000 * quantile([each.last_s for each in found], 95), STOP_MS, "ms"),
        Bound("barge-in: words kept - heard, p95", quantile([abs(each.off) for each in found], 95), WORDS),
        Bound("barge-in: transcripts that are no prefix of the answer", sum(not each.is_prefix for each in found), 0),
    ]


def show_barge_ins(console: Console, found: Sequence[BargeIn], asked: int, errors: Sequence[str]) -> None:
    """Print one row, and why interruptions are missing."""
    table = Table("interruptions", "player stops, p50 / p95, ms", "last sound", "response.done", "words kept - heard")
    off = [each.off for each in found]
    counts = ", ".join(f"{value:+d}: {off.count(value)}" for value in sorted(set(off)))
    times = [[each.stopped_s for each in found], [each.last_s for each in found], [each.done_s for each in found]]
    table.add_row(f"{len(found)} of {asked}", *(quantiles(each, 50, 95) for each in times), counts)
    console.print(table)
    for error in errors:
        console.print(escape(error), style="red")


def turn_bounds(found: Sequence[Heard]) -> list[Bound]:
    """Return the bounds of each kind of detection, over all noises."""
    bounds = [Bound("turns: sessions lost", sum(bool(each.lost) for each in found), 0)]
    for detection, most in END_MS.items():
        rows = [each for each in found if each.detection == detection]
        bounds.append(Bound(f"{detection}: sentences cut, missed or joined", sum(each.wrong for each in rows), 0))
        for place, values in (
            ("in the sound", [value for each in rows for value in each.positions_s]),
            ("at the client", [value for each in rows for value in each.ends_s]),
        ):
            bounds.append(Bound(f"{detection}: end of turn {place}, p95", 1000 * quantile(values, 95), most, "ms"))
    return bounds


def show_turns(console: Console, found: Sequence[Heard]) -> None:
    """Print a row for each session."""
    delays = [
        f"{what}, p50 / p95 / most, ms" for what in ("start at the client", "end in the sound", "end at the client")
    ]
    table = Table("detection", "noise", "sentences", "wrong", *delays, "sound sent late, p95, ms")
    for each in found:
        noise = "none" if each.noise_db is None else f"-{each.noise_db} dB"
        values = [quantiles(delays_s, 50, 95, 100) for delays_s in (each.starts_s, each.positions_s, each.ends_s)]
        counts = (str(len(each.ends_s) + each.wrong), str(each.wrong))
        table.add_row(each.detection, noise, *counts, *values, f"{1000 * each.late_s:.0f}")
    console.print(table)
    for each in found:
        if each.lost:
            console.print(escape(f"{each.detection}: {each.lost}"), style="red")
