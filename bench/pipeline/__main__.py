"""The command. Each repetition measures one load of all contenders after the other, then the next load, so that a
machine whose speed drifts affects all alike. The command prints medians over the repetitions, and ratios of medians."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import click
import trio
from rich.console import Console
from rich.table import Table

from bench.pipeline import report, trace
from bench.pipeline.load import Cell, Contender, Failure, Plan, measure
from bench.pipeline.ours import Ours, RingsOnly
from bench.pipeline.peers import MpQueues, RayActors, ZmqMsgpack

CONTENDERS: tuple[Contender, ...] = (Ours(), RingsOnly(), MpQueues(), ZmqMsgpack(), RayActors())
REFERENCE = MpQueues.name
PEERS = frozenset({MpQueues.name, ZmqMsgpack.name, RayActors.name})
IN_FLIGHT, SIZES = (1, 64, 1_000, 10_000), (1024, 1024 * 1024)
MOST_BYTES = 2 * 1024**3
"""Loads with more bytes in flight are left out: each process of a peer may hold all of them."""
QUICK = Plan(window_s=0.1, least=20, longest_s=5.0, idle_s=0.1)
QUICK_IN_FLIGHT, QUICK_SIZES = (1, 16), (1024,)
TRACED = 300


def run(figures: report.Figures, wanted: list[Contender], cells: list[Cell], plan: Plan) -> None:
    """Measure one repetition."""
    for cell in cells:
        in_flight_bytes = cell.in_flight * cell.size
        for contender in wanted:
            if in_flight_bytes <= MOST_BYTES:
                figures.add(contender.name, cell, measure(contender, cell, plan))
            else:
                figures.add(contender.name, cell, Failure(f"left out: {in_flight_bytes / 1024**3:.0f} GiB in flight"))


def show_bounds(console: Console, found: list[report.Bound]) -> None:
    """Print the bounds and whether each is met."""
    table = Table("bound", "measured", "accepted", "")
    for bound in found:
        verdict = "met" if bound.met else "[red]not met[/]"
        table.add_row(bound.name, f"{bound.measured:,.2f}", bound.accepted, verdict)
    console.print(table)


@click.command()
@click.option("--rounds", default=3, show_default=True, help="Repetitions.")
@click.option("--in-flight", "counts", multiple=True, type=int, help="Only this many requests; may be repeated.")
@click.option("--size", "sizes", multiple=True, type=int, help="Only payloads of this size, bytes; may be repeated.")
@click.option("--only", multiple=True, metavar="NAME", help="Only contenders with this in their name; may be repeated.")
@click.option("--quick", is_flag=True, help="One short repetition of small loads, no bounds: does everything work?")
@click.option("--trace", "traced", is_flag=True, help="Instead, trace single requests through all processes.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write the figures here.")
def main(
    rounds: int,
    counts: tuple[int, ...],
    sizes: tuple[int, ...],
    only: tuple[str, ...],
    quick: bool,
    traced: bool,
    json_file: Path | None,
) -> None:
    """Measure our pipeline beside others, print tables, and print which bounds are met."""
    console = Console(width=max(Console().width, 150))
    if traced:
        console.print(trace.table(trio.run(trace.measure, 20 if quick else TRACED)))
        return
    wanted = [contender for contender in CONTENDERS if not only or any(part in contender.name for part in only)]
    in_flight = list(counts or (QUICK_IN_FLIGHT if quick else IN_FLIGHT))
    payloads = list(sizes or (QUICK_SIZES if quick else SIZES))
    cells = [Cell(count, size) for size in payloads for count in in_flight]
    figures = report.Figures()
    for number in range(1 if quick else rounds):
        Console(stderr=True).print(f"[dim]repetition {number + 1}, load {os.getloadavg()[0]:.1f}[/]")
        run(figures, wanted, cells, QUICK if quick else Plan())
    for size in payloads:
        console.print(report.table(figures, size, [each.name for each in wanted], in_flight, REFERENCE))
    found = (
        []
        if quick
        else list(report.bounds(figures, payloads, in_flight, ours=Ours.name, peers=PEERS, reference=REFERENCE))
    )
    if found:
        show_bounds(console, found)
    if json_file is not None:
        written = {**figures.as_json(), "bounds": [bound._asdict() for bound in found]}
        json_file.write_text(json.dumps(written, indent=1))
    if not all(bound.met for bound in found):
        sys.exit(1)


if __name__ == "__main__":
    main()
