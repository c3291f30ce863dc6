"""The command. Each repetition measures all transports at one size, then at the next, so that a machine whose speed
drifts affects all alike. The command prints medians, and ratios of medians."""

from __future__ import annotations

import json
import os
import platform
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table as RichTable

from bench.ring import checks, measure, report
from bench.ring.peers import Iceoryx, IceoryxEvents, RayStore, VllmOmni, ZmqMsgpack
from bench.ring.transports import (
    Memcpy,
    MemcpyOverTwo,
    MpPipe,
    MpQueue,
    OurReserveTuned,
    OurSend,
    OurSendTuned,
    OurTrio,
    UnixSocket,
)

TRANSPORTS: tuple[Any, ...] = (
    Memcpy(),
    MemcpyOverTwo(),
    OurSend(),
    OurSendTuned(),
    OurReserveTuned(),
    OurTrio(),
    MpQueue(),
    MpPipe(),
    UnixSocket(),
    ZmqMsgpack(),
    Iceoryx(),
    IceoryxEvents(),
    VllmOmni(),
    RayStore(),
)
QUICK = measure.Plan(warm_s=0.01, stream_s=0.03, paced_s=0.03, least=3, trips=200)
LONG = 10_000_000


def machine() -> dict[str, str]:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "?")
    packages = ("trio", "numpy", "msgspec", "torch", "pyzmq", "iceoryx2", "ray", "vllm-omni")
    found = {name: version for name in packages if (version := _version(name))}
    return {
        "cpu": f"{model}, {os.cpu_count()} cores",
        "linux": platform.release(),
        "python": platform.python_version(),
    } | found


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def rounds(figures: report.Figures, wanted: list[Any], sizes: list[int], plan: measure.Plan, count: int) -> None:
    """Fill ``figures``. A transport with a background service runs last, so that it does not disturb the others."""
    console = Console(stderr=True)
    for number in range(count):
        console.print(f"[dim]repetition {number + 1} of {count}[/]")
        plain = [transport for transport in wanted if not hasattr(transport, "start")]
        for size in sizes:
            for transport in plain:
                one(figures, transport, size, plan)
        for transport in wanted:
            if hasattr(transport, "start") and transport.name not in figures.missing:
                try:
                    transport.start()
                except (ImportError, RuntimeError) as error:
                    figures.missing[transport.name] = str(error)
                    continue
                try:
                    for size in sizes:
                        one(figures, transport, size, plan)
                finally:
                    transport.stop()
        for kind in checks.ROUND_TRIPS if plan.trips else ():
            figures.round_trips_s.setdefault(kind.name, []).append(checks.round_trip_s(kind, plan.trips, plan.cores))


def one(figures: report.Figures, transport: Any, size: int, plan: measure.Plan) -> None:
    if transport.name in figures.missing or not transport.takes(size):
        return
    try:
        result = measure.measure(transport, size, plan)
    except ImportError as error:
        figures.missing[transport.name] = str(error)
        return
    except Exception as error:  # noqa: BLE001 - a peer that cannot be opened must not lose the others' figures
        result = measure.Failure(f"{type(error).__name__}: {error}")
    figures.add(transport.name, size, result)


def show(console: Console, table: report.Table) -> None:
    title, columns, rows = table
    drawn = RichTable(title=title, title_justify="left")
    for number, column in enumerate(columns):
        drawn.add_column(column, justify="right" if number else "left")
    for row in rows:
        drawn.add_row(*row)
    console.print(drawn)


@click.command()
@click.option("--rounds", "count", default=5, show_default=True, help="Repetitions.")
@click.option("--only", multiple=True, metavar="NAME", help="Only transports with this in their name; may be repeated.")
@click.option("--size", "sizes", multiple=True, type=int, help="Only this size, in bytes; may be repeated.")
@click.option("--cores", type=(int, int), default=(0, 1), show_default=True, help="Of the producer and the consumer.")
@click.option("--quick", is_flag=True, help="One short repetition, no targets: does everything work?")
@click.option("--long", "long", is_flag=True, help=f"Also send {LONG:,} messages and watch memory and descriptors.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write the figures here.")
@click.option("--markdown", "markdown_file", type=click.Path(path_type=Path), help="Write the tables here.")
@click.option("--png", "png_file", type=click.Path(path_type=Path), help="Plot throughput and latency over size.")
def main(
    count: int,
    only: tuple[str, ...],
    sizes: tuple[int, ...],
    cores: tuple[int, int],
    quick: bool,
    long: bool,
    json_file: Path | None,
    markdown_file: Path | None,
    png_file: Path | None,
) -> None:
    """Measure the ring and its peers, print tables, and print which targets are met."""
    if missing := set(cores) - os.sched_getaffinity(0):
        raise click.UsageError(f"there is no core {min(missing)}: name two cores with --cores")
    wanted = [transport for transport in TRANSPORTS if not only or any(part in transport.name for part in only)]
    figures = report.Figures()
    plan = (QUICK if quick else measure.Plan())._replace(cores=cores)
    rounds(figures, wanted, sorted(sizes or report.SIZES), plan, 1 if quick else count)
    console = Console(width=max(Console().width, 150))
    found: list[report.Target] = []
    if not quick:
        figures.idle = {
            "blocked in recv": checks.idle(3.0, in_trio=False),
            "parked in trio": checks.idle(3.0, in_trio=True),
        }
        found = report.targets(figures)
    shown = report.tables(figures)
    if long:
        marks, rate = checks.long_run(LONG, cores)
        found += report.flat(marks)
        rows = [[f"{mark.at:.0%}", *(f"{rss / 1e6:.2f}" for rss in mark.rss), *map(str, mark.fds)] for mark in marks]
        columns = ["", "producer, MB", "consumer, MB", "producer's fds", "consumer's fds"]
        shown.append((f"{LONG:,} messages of 64 B, {rate:,.0f} a second", columns, rows))
    if found:
        shown.append(report.target_table(found))
    facts = machine()
    console.print(", ".join(f"{name} {value}" for name, value in facts.items()), style="dim")
    for table in shown:
        show(console, table)
    if markdown_file is not None:
        markdown_file.write_text(report.markdown(shown))
    if json_file is not None:
        result = {"machine": facts, "rounds": 1 if quick else count, **figures.as_json()}
        json_file.write_text(json.dumps(result | {"targets": [target._asdict() for target in found]}, indent=1))
    if png_file is not None:
        report.plot(figures, png_file)
    if any(target.met is False for target in found):
        sys.exit(1)


if __name__ == "__main__":
    main()
