"""The command: rounds, the table and the bounds."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import click
from rich.console import Console
from rich.table import Table

from bench.link.measure import ECHO_SIZES, STREAM_SIZES, Figures, Transport, measure
from bench.link.ray_objects import RayObjects, why_no_ray
from bench.link.transports import Bare, Link, Relayed, RingAlone, TlsLink, Zmq
from tests.support.network import Namespace, two_namespaces, why_no_namespaces

TRANSPORTS: tuple[Transport, ...] = (
    *(Bare(), Relayed(), Link(), TlsLink(), RingAlone()),
    *((Zmq(),) if importlib.util.find_spec("zmq") else ()),
)


def iperf3(nodes: tuple[Namespace, Namespace]) -> dict[str, float] | None:
    """Return its bytes per second and CPU seconds per GB; None where it is not installed."""
    if shutil.which("iperf3") is None:
        return None
    server = subprocess.Popen(nodes[1].command("iperf3", "-s", "--forceflush"), stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    with server.stdout:
        try:
            while "listening" not in (line := server.stdout.readline()):
                assert line, "iperf3 ended before it listened"
            done = nodes[0].run("iperf3", "-c", nodes[1].address, "-t", "2", "-J")
        finally:
            server.kill()
            server.wait()
    end = json.loads(done)["end"]
    used = end["cpu_utilization_percent"]
    rate = end["sum_received"]["bits_per_second"] / 8
    return {
        "bytes_per_s": rate,
        "cpu_s_per_gb": (used["host_total"] + used["remote_total"]) / 100 / (rate / 1e9),
    }


class Target(NamedTuple):
    what: str
    ratio: float
    bound: str
    met: bool


def median_ratio(rounds: list[dict[str, Figures]], pick: Callable[[Figures], float], name: str) -> float:
    return statistics.median(pick(each[name]) / pick(each[Bare.name]) for each in rounds)


def ring_trips(rounds: list[dict[str, Figures]], size: int) -> float:
    """Return a round trip over a link in parts of what it is made of: bare TCP, and a ring at each end."""
    return statistics.median(
        each[Link.name].round_trip_s[size]
        / (each[Bare.name].round_trip_s[size] + 2 * each[RingAlone.name].round_trip_s[size])
        for each in rounds
    )


def targets(rounds: list[dict[str, Figures]]) -> list[Target]:
    found = [median_ratio(rounds, lambda figures: figures.bytes_per_s[1 << 20], Link.name)]
    results = [Target("rate at 1 MiB / bare TCP", found[0], "≥ 0.5", found[0] >= 0.5)]
    for size in ECHO_SIZES:
        ratio = median_ratio(rounds, lambda figures, size=size: figures.round_trip_s[size], Link.name)  # type: ignore[misc]
        results.append(Target(f"round trip of {size} B / bare TCP", ratio, "≤ 2", ratio <= 2))
    return results


def cell(rounds: list[dict[str, Figures]], name: str, pick: Callable[[Figures], float], unit: str) -> str:
    try:
        value = statistics.median(pick(each[name]) for each in rounds)
    except KeyError:
        return "-"
    return f"{value:.3g} {unit} ({median_ratio(rounds, pick, name):.2f})"


def rows(rounds: list[dict[str, Figures]]) -> list[list[str]]:
    """Medians of the rounds, and medians of the ratios to bare TCP."""
    table = []
    for what, sizes, pick, unit in (
        ("stream", STREAM_SIZES, lambda f, s: f.bytes_per_s[s] / 1e6, "MB/s"),
        ("CPU", STREAM_SIZES, lambda f, s: f.cpu_s_per_gb[s], "s/GB"),
        ("round trip", ECHO_SIZES, lambda f, s: f.round_trip_s[s] * 1e6, "µs"),
    ):
        for size in sizes:
            cells = [cell(rounds, name, lambda figures, s=size, p=pick: p(figures, s), unit) for name in rounds[0]]
            table.append([f"{what}, {size} B", *cells])
    return table


@click.command()
@click.option("--rounds", default=5, show_default=True)
@click.option("--seconds", default=0.5, show_default=True, help="Length of each stream.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write all figures there.")
@click.option("--without-ray", is_flag=True, help="Do not start Ray on both nodes, which takes half a minute.")
def main(rounds: int, seconds: float, json_file: Path | None, without_ray: bool) -> None:
    """Measure a link between two network namespaces beside other transports."""
    if (why := why_no_namespaces()) is not None:
        raise click.ClickException(why)
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))  # no namespace is left then either
    load = os.getloadavg()
    with ExitStack() as stack:
        nodes = stack.enter_context(two_namespaces())
        ray = None if without_ray or why_no_ray() else stack.enter_context(RayObjects(nodes))
        measured = []
        for _ in range(rounds):
            figures = {each.name: measure(each, nodes, seconds) for each in TRANSPORTS}
            if ray is not None:
                figures[ray.name] = ray.measure(seconds)
            measured.append(figures)
        peak = iperf3(nodes)
    table = Table("", *measured[0], title=f"medians of {rounds} rounds (ratio to bare TCP); load {load[0]:.1f}")
    for row in rows(measured):
        table.add_row(*row)
    console = Console(width=120)
    console.print(table)
    console.print(f"iperf3: {'not installed' if peak is None else peak}")
    found = targets(measured)
    for size in ECHO_SIZES:
        console.print(f"round trip of {size} B / (bare TCP + a ring at each end): {ring_trips(measured, size):.2f}")
    for target in found:
        console.print(f"{target.what}: {target.ratio:.2f} ({target.bound}: {'met' if target.met else 'not met'})")
    if json_file is not None:
        data = {
            "load": load,
            "cores": os.cpu_count(),
            "rounds": [{name: figures._asdict() for name, figures in each.items()} for each in measured],
            "iperf3": peak,
            "targets": [target._asdict() for target in found],
        }
        json_file.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    sys.exit(0 if all(target.met for target in found) else 1)


if __name__ == "__main__":
    main()
