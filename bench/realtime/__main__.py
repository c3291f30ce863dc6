"""The command. It prints each part when it ends, and exits with 1 when a bound is not met.

A part that ends early, by an error, Ctrl-C or SIGTERM, is printed with what it has.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import warnings
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from bench.bounds import Bound, finite, show_bounds
from bench.realtime import barge_in, end_of_turn, kills, report
from bench.realtime.server import Server, serving

PARTS = ("kills", "turns", "barge-in")


class Measurement:
    """All that was measured until now. plan: the options of the command."""

    def __init__(self, console: Console, overrides: Sequence[str], plan: dict[str, Any]) -> None:
        self._console, self._overrides, self._plan = console, overrides, plan
        self.figures: dict[str, Any] = {"load": os.getloadavg()[0]}
        self.bounds: list[Bound] = []

    async def run(self, parts: Sequence[str]) -> None:
        """Measure the parts. SIGTERM cancels this."""
        task = asyncio.current_task()
        assert task is not None
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        if "kills" in parts:
            for variant in self._plan["variants"]:
                await self._kills(variant)
        if "turns" in parts or "barge-in" in parts:
            async with serving(self._overrides) as server:
                if "turns" in parts:
                    await self._turns(server)
                if "barge-in" in parts:
                    await self._barge_in(server)

    async def _kills(self, variant: str) -> None:
        run = kills.Run(variant, self._plan["seconds"])
        given = {name: self._plan[name] for name in ("sessions", "every_s")}
        try:
            await kills.measure(run, **given, overrides=self._overrides)
        finally:
            report.show_kills(self._console, run)
            self.bounds += report.kill_bounds(run)
            self.figures.setdefault("kills", []).append(run.figures())

    async def _turns(self, server: Server) -> None:
        found = list[end_of_turn.Heard]()
        try:
            await end_of_turn.measure(server, self._plan["sentences"], found)
        finally:
            report.show_turns(self._console, found)
            self.bounds += report.turn_bounds(found)
            self.figures["turns"] = [asdict(each) for each in found]

    async def _barge_in(self, server: Server) -> None:
        found, errors, asked = list[barge_in.BargeIn](), list[str](), self._plan["interruptions"]
        try:
            await barge_in.measure(server, asked, found, errors)
        finally:
            report.show_barge_ins(self._console, found, asked, errors)
            self.bounds += report.barge_in_bounds(found, asked)
            self.figures["barge_in"] = [asdict(each) for each in found]


@click.command()
@click.option("--only", multiple=True, type=click.Choice(PARTS), help="One part; may be repeated.")
@click.option(
    "--variant",
    "variants",
    multiple=True,
    type=click.Choice(tuple(kills.VARIANTS)),
    default=("cold restart", "standby: 1"),
    show_default=True,
    help="Of kills; may be repeated.",
)
@click.option("--sessions", default=4, show_default=True, help="Sessions at a time while stages are killed.")
@click.option("--seconds", default=300.0, show_default=True, help="How long each variant of kills lasts.")
@click.option("--every", "every_s", default=10.0, show_default=True, help="Seconds between two deaths.")
@click.option("--interruptions", default=42, show_default=True, help="Answers that the user talks over.")
@click.option("--sentences", default=20, show_default=True, help="Sentences of each session of turns.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write all values to this file.")
@click.option("-s", "--set", "overrides", multiple=True, metavar="PATH=VALUE", help="Override a value of the pipeline.")
def main(only: tuple[str, ...], overrides: tuple[str, ...], json_file: Path | None, **plan: Any) -> None:
    """Talk to a server, print tables, and report whether the bounds are met."""
    # The client calls websockets in a way that its newest version deprecates.
    warnings.filterwarnings("ignore", "connect\\(\\) must be used as a context manager", DeprecationWarning)
    console = Console(width=200)
    measurement = Measurement(console, overrides, plan)
    is_complete = False
    try:
        asyncio.run(measurement.run(only or PARTS))
        is_complete = True
    except (asyncio.CancelledError, KeyboardInterrupt):
        console.print("interrupted")
    finally:
        show_bounds(console, measurement.bounds)
        if json_file is not None:
            bounds = [{**asdict(each), "met": each.is_met} for each in measurement.bounds]
            json_file.write_text(json.dumps(finite({**measurement.figures, "bounds": bounds}), indent=1))
    sys.exit(0 if is_complete and all(each.is_met for each in measurement.bounds) else 1)


if __name__ == "__main__":
    main()
