"""The command. It exits with 1 when a bound is not met."""

from __future__ import annotations

import asyncio
import json
import math
import os
import sys
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from bench.realtime import barge_in, end_of_turn, kills
from bench.realtime.server import serving
from omni_actors.stress.report import percentile

PARTS = ("kills", "barge_in", "end_of_turn")
STOP_MS = 250
"""The bound of a barge-in's last sound, at the 95th percentile."""
END_MS = {"server_vad": 600, "semantic_vad": 400}
"""The bounds of the end of a turn, at the 95th percentile: the configured silence and 100 ms, and the issue's."""
WORDS = 1
"""How many words a kept transcript may differ by, at the 95th percentile."""


def quantile(values: Iterable[float], share: int) -> float:
    """Return a percentile; infinity of no values."""
    found = percentile([value for value in values if math.isfinite(value)], share)
    return math.inf if found is None else found


def quantiles(values_s: Sequence[float], *shares: int) -> str:
    """Return percentiles of seconds, in milliseconds: "120 / 250"."""
    return " / ".join(f"{1000 * quantile(values_s, share):.0f}" for share in shares)


def show_kills(console: Console, runs: Sequence[kills.Run]) -> bool:
    """Print a row for each variant. Return whether no session was lost, and no underrun is unexplained."""
    names = ("deaths", "sessions lost", "answered", "underruns", "of them in no load", "longest gap", "silence / sound")
    table = Table("variant", "load", *names, "stage serves again after, p50 / max, ms", "first sound, p50 / p95, ms")
    held = True
    for run in runs:
        answered = sum(each.is_answered for each in run.asked)
        loads = quantiles([death.load_s for death in run.deaths], 50, 100)
        first = quantiles([each.first_s for each in run.asked], 50, 95)
        gaps = [each.gap_s for each in run.underruns]
        silence = f"{sum(gaps):.1f} s / {sum(each.sound_s for each in run.asked):.0f} s"
        table.add_row(
            run.variant,
            " - ".join(f"{load:.1f}" for load in run.load),
            str(len(run.deaths)),
            str(len(run.lost)),
            f"{answered} of {len(run.asked)}",
            str(len(gaps)),
            str(len(run.unexplained)),
            f"{max(gaps, default=0):.2f} s",
            silence,
            loads,
            first,
        )
        held &= not run.lost and answered == len(run.asked) and not run.unexplained
        held &= run.variant == "cold restart" or not gaps
        for problem in (
            *run.lost,
            *run.errors,
            *(f"{each.text} {each.status}" for each in run.asked if not each.is_answered),
        ):
            console.print(f"[red]{run.variant}: {problem}[/]")
    console.print(table)
    return held


def show_barge_ins(console: Console, found: Sequence[barge_in.BargeIn], asked: int) -> bool:
    """Print one row. Return whether the bounds are met. asked: how many there should be."""
    table = Table("interruptions", "player stops, p50 / p95, ms", "last sound", "response.done", "words kept - heard")
    off = [each.kept - each.heard for each in found]
    counts = ", ".join(f"{value:+d}: {off.count(value)}" for value in sorted(set(off)))
    times = [[each.stopped_s for each in found], [each.last_s for each in found], [each.done_s for each in found]]
    table.add_row(f"{len(found)} of {asked}", *(quantiles(each, 50, 95) for each in times), counts)
    console.print(table)
    held = len(found) == asked and 1000 * quantile(times[1], 95) <= STOP_MS
    return held and quantile([abs(each) for each in off], 95) <= WORDS


def show_ends(console: Console, found: Sequence[end_of_turn.Heard]) -> bool:
    """Print a row for each session. Return whether the bounds are met."""
    table = Table(
        "detection", "noise", "sentences", "wrong", "start, p50 / p95 / most, ms", "end, p50 / p95 / most, ms"
    )
    held = True
    for each in found:
        noise = "none" if each.noise_db is None else f"-{each.noise_db} dB"
        delays = [quantiles(values, 50, 95, 100) for values in (each.starts_s, each.ends_s, each.positions_s)]
        table.add_row(each.detection, noise, str(len(each.ends_s) + each.wrong), str(each.wrong), *delays)
        held &= not each.wrong and 1000 * quantile(each.ends_s, 95) <= END_MS[each.detection]
    console.print(table)
    return held


async def measure(
    console: Console, only: Sequence[str], overrides: Sequence[str], plan: dict[str, Any]
) -> tuple[dict[str, Any], bool]:
    """Return all figures, and whether the bounds are met."""
    figures: dict[str, Any] = {"load": os.getloadavg()[0]}
    held = True
    if "kills" in only:
        given = {name: plan[name] for name in ("sessions", "seconds", "every_s")}
        runs = [await kills.measure(variant, **given, overrides=overrides) for variant in plan["variants"]]
        held &= show_kills(console, runs)
        figures["kills"] = [asdict(run) for run in runs]
    if {"barge_in", "end_of_turn"} & set(only):
        async with serving(overrides) as server:
            if "barge_in" in only:
                barge_ins = await barge_in.measure(server, plan["interruptions"])
                held &= show_barge_ins(console, barge_ins, plan["interruptions"])
                figures["barge_in"] = [asdict(each) for each in barge_ins]
            if "end_of_turn" in only:
                ends = await end_of_turn.measure(server, plan["sentences"])
                held &= show_ends(console, ends)
                figures["end_of_turn"] = [asdict(each) for each in ends]
    return figures, held


@click.command()
@click.option("--only", multiple=True, type=click.Choice(PARTS), help="One part; may be repeated.")
@click.option("--variant", "variants", multiple=True, type=click.Choice(tuple(kills.VARIANTS)), help="Of kills.")
@click.option("--sessions", default=4, show_default=True, help="Sessions at a time while stages are killed.")
@click.option("--seconds", default=300.0, show_default=True, help="How long each variant of kills lasts.")
@click.option("--every", "every_s", default=10.0, show_default=True, help="Seconds between two deaths.")
@click.option("--interruptions", default=42, show_default=True, help="Answers that the user talks over.")
@click.option("--sentences", default=20, show_default=True, help="Sentences of each session of end_of_turn.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write all values to this file.")
@click.option("-s", "--set", "overrides", multiple=True, metavar="PATH=VALUE", help="Override a value of the pipeline.")
def main(
    only: tuple[str, ...], variants: tuple[str, ...], overrides: tuple[str, ...], json_file: Path | None, **plan: Any
) -> None:
    """Talk to a server, print tables, and report whether the bounds are met."""
    # The client calls websockets in a way that its newest version deprecates.
    warnings.filterwarnings("ignore", "connect\\(\\) must be used as a context manager", DeprecationWarning)
    console = Console(width=200)
    plan["variants"] = variants or tuple(kills.VARIANTS)
    figures, held = asyncio.run(measure(console, only or PARTS, overrides, plan))
    if json_file is not None:
        json_file.write_text(json.dumps(figures, indent=1))
    sys.exit(0 if held else 1)


if __name__ == "__main__":
    main()
