"""`python -m bench.contrast_shm`: what a killed process leaves in /dev/shm, our ring beside vllm-omni's connector.

A trial is a service of its own: a parent, and a producer and a consumer that pass messages through one transport,
used as `python -m bench.ring` uses it. At a random moment one of them, both, or all three get SIGKILL. What is new in
/dev/shm is counted a second later (the rest of the service lives on, as one with a supervisor would), and again when
all of the service has been gone for a second: then a resource tracker, where Python ran one, has cleaned up.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from bench.ring.measure import fork
from bench.ring.peers import VllmOmni
from bench.ring.transports import OurSend

SHM = Path("/dev/shm")
TRANSPORTS = {transport.name: transport for transport in (OurSend, VllmOmni)}
VICTIMS = {
    "consumer": ("consumer",),
    "producer": ("producer",),
    "both": ("producer", "consumer"),
    "all, parent too": ("parent", "producer", "consumer"),
}
AFTER_S = 1.0
Left = tuple[int, int]
"""(entries, bytes)."""


def service(name: str, size: int) -> None:
    """Run one transport until killed. Prints the pids of its processes when both ends are about to start."""
    transport = TRANSPORTS[name]()
    transport.open(size)
    message = memoryview(os.urandom(size))

    def endless() -> Iterator[memoryview]:
        while True:
            yield message

    ends = {
        "consumer": fork.Process(target=transport.consume, args=(lambda _: False,)),
        "producer": fork.Process(target=transport.produce, args=(endless(),)),
    }
    for process in ends.values():
        process.start()
    print(json.dumps({"parent": os.getpid(), **{end: process.pid for end, process in ends.items()}}), flush=True)
    while True:
        signal.pause()


def trial(name: str, size: int, victims: tuple[str, ...], after_s: float) -> tuple[Left, Left]:
    """Return what is left while the rest of the service lives, and after it has ended."""
    before = set(os.listdir(SHM))
    command = [sys.executable, "-m", "bench.contrast_shm", "--service", name, "--size", str(size)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        pids: dict[str, int] = json.loads(process.stdout.readline())
        time.sleep(after_s)
        for victim in victims:
            os.kill(pids[victim], signal.SIGKILL)
        time.sleep(AFTER_S)
        living = _left(before)
        for end in ("producer", "consumer", "parent"):
            if end not in victims:
                os.kill(pids[end], signal.SIGKILL)
    time.sleep(AFTER_S)
    gone = _left(before)
    for entry in set(os.listdir(SHM)) - before:
        (SHM / entry).unlink()
    return living, gone


def _left(before: set[str]) -> Left:
    new = [SHM / name for name in set(os.listdir(SHM)) - before]
    return len(new), sum(path.stat().st_size for path in new)


def row(name: str, victims: str, trials: list[tuple[Left, Left]]) -> dict[str, Any]:
    """Summarise trials of one kind: in how many something was left, and the mean entries and bytes."""
    result: dict[str, Any] = {"transport": name, "killed": victims, "trials": len(trials)}
    for when, each in (("service_lives", [living for living, _ in trials]), ("all_gone", [gone for _, gone in trials])):
        result[when] = {
            "trials_with_something": sum(entries > 0 for entries, _ in each),
            "entries": sum(entries for entries, _ in each) / len(each),
            "bytes": sum(size for _, size in each) / len(each),
        }
    return result


def markdown(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| transport | SIGKILL of | trials | left, service alive: trials, entries, MB | left, service gone |",
        "|---|---|---:|---:|---:|",
    ]
    for each in rows:
        shown = [
            f"{left['trials_with_something']} of {each['trials']}, {left['entries']:.1f}, {left['bytes'] / 1e6:.1f}"
            for left in (each["service_lives"], each["all_gone"])
        ]
        lines.append(f"| {each['transport']} | {each['killed']} | {each['trials']} | {shown[0]} | {shown[1]} |")
    return "\n".join(lines)


@click.command()
@click.option("--trials", default=20, show_default=True, type=click.IntRange(min=1), help="Of each kind.")
@click.option("--size", default=1_000_000, show_default=True, type=click.IntRange(min=1), help="Bytes of a message.")
@click.option("--seed", default=1, show_default=True)
@click.option("--json", "json_file", type=click.Path(dir_okay=False, writable=True, path_type=Path))
@click.option("--service", "served", hidden=True)
def main(trials: int, size: int, seed: int, json_file: Path | None, served: str | None) -> None:
    """Kill, count, and print a table."""
    if served is not None:
        service(served, size)
    moments = random.Random(seed)
    rows = []
    for name, transport in TRANSPORTS.items():
        try:
            transport().open(size)
        except ModuleNotFoundError as error:
            click.echo(f"{name} is not installed ({error}); see requirements/bench.txt", err=True)
            continue
        for victims, pids in VICTIMS.items():
            done = [trial(name, size, pids, moments.uniform(0.2, 0.4)) for _ in range(trials)]
            rows.append(row(name, victims, done))
    click.echo(markdown(rows))
    if json_file is not None:
        json_file.write_text(json.dumps({"size": size, "seed": seed, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
