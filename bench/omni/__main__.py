"""`python -m bench.omni`: measure what streaming between the stages of an omni model gains.

For each scenario (``bench.omni.pipelines``) three systems are open at once: streamed, gathered (each stage waits for
all of its input), and the thinker alone. Only one system computes at a time. Rounds go through the systems in turn, so
that a drift of the machine's speed affects all equally. The benchmark prints medians and ratios of medians.

TTFT is compared round by round, in random order, with that of the same workers when no speech is requested, and with
the thinker alone. Two processes that do the same can differ by 9% for as long as they live.
"""

from __future__ import annotations

import gc
import json
import math
import random
import statistics
import subprocess
import sys
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import click
import msgspec
import trio
from rich.console import Console
from rich.table import Table

from bench.omni import batching, pipelines
from bench.omni.measure import Client, Run, cores, median
from omni_actors import OmniSystem

SPEEDUP = 4.0
"""The least ratio of throughput that batching must reach."""
TTFT_ROUNDS = 32
"""Additional rounds up to the first text only, where a millisecond matters."""
ALONE, SILENT = "thinker alone", "talker off"
Bound = tuple[str, float, float]
"""Name, ratio, and the largest ratio that is allowed."""


class Results(msgspec.Struct):
    """The results of one number of concurrent requests."""

    runs: dict[str, Run]
    """By system."""
    ttft: dict[str, tuple[float, float]]
    """The ratio of the streamed system's TTFT to that of the same workers without speech (``SILENT``), and to that of
    the thinker alone (``ALONE``): geometric mean over the rounds, and its standard error."""


async def measure(scenario: pipelines.Scenario, concurrency: list[int], rounds: int) -> dict[int, Results]:
    """Return the results by number of concurrent requests. The first round of each kind warms up and is not counted."""
    both = ("text", "audio")
    systems = {
        "streamed": (scenario.pipeline(streamed=True), both),
        "gathered": (scenario.pipeline(streamed=False), both),
        ALONE: (scenario.pipeline(streamed=True, speaks=False), ("text",)),
    }
    async with AsyncExitStack() as stack:
        clients = {}
        for name, (pipeline, modalities) in systems.items():
            omni = await stack.enter_async_context(OmniSystem.open(pipeline))
            await omni.wait_ready()
            clients[name] = Client(omni, scenario, modalities)
        gc.collect()
        gc.freeze()  # collecting transformers' objects, from making the checkpoint, takes 0.2 s
        stack.callback(gc.unfreeze)
        silent = clients["streamed"].silent()
        results = {}
        for number in concurrency:
            runs: dict[str, list[Run]] = {name: [] for name in clients}
            for turn in range(rounds + 1):
                for name, client in clients.items():
                    run = await client.run(number)
                    if turn:
                        runs[name].append(run)
            clients_by_name = {"streamed": clients["streamed"], SILENT: silent, ALONE: clients[ALONE]}
            first: dict[str, list[float]] = {name: [] for name in clients_by_name}
            for turn in range(TTFT_ROUNDS + 1):
                for name in random.sample(sorted(clients_by_name), len(clients_by_name)):
                    ttft_s = await clients_by_name[name].ttft_s(number)
                    if turn:
                        first[name].append(ttft_s)
            results[number] = Results(
                {name: median(runs[name], first.get(name, [])) for name in clients},
                {name: _ratio(first["streamed"], first[name]) for name in (SILENT, ALONE)},
            )
    return results


def _ratio(ours: list[float], theirs: list[float]) -> tuple[float, float]:
    """Return the geometric mean of the ratios, and its standard error."""
    logarithms = [math.log(one / other) for one, other in zip(ours, theirs, strict=True)]
    mean = math.exp(statistics.mean(logarithms))
    return mean, mean * statistics.stdev(logarithms) / math.sqrt(len(logarithms))


def bounds(scenario: str, results: Results) -> list[Bound]:
    """Return the bounds that the results must meet."""
    streamed, gathered = results.runs["streamed"], results.runs["gathered"]
    assert streamed.ttfa_s is not None
    assert gathered.ttfa_s is not None
    # From the gathered system, whose stages run one after the other and compete for no core.
    slowest = max(gathered.steps_s.values())
    return [
        ("TTFA, streamed / gathered", streamed.ttfa_s / gathered.ttfa_s, 0.15),
        ("E2E / max(slowest stage, CPU / cores)", streamed.e2e_s / max(slowest, streamed.cpu_s / cores()), 1.1),
        ("TTFT, streamed / talker off", results.ttft[SILENT][0], 1.05),
        *([("the parent's share of CPU", streamed.parent_cpu, 0.05)] if scenario == "compute" else []),
    ]


def monolith(directory: Path, rounds: int) -> dict[int, float]:
    """Return the seconds of transformers' ``generate`` by number of threads: the best of the rounds after a warm-up."""
    best = {}
    for threads in (1, cores()):
        command = [sys.executable, "-m", "bench.omni.whole", str(directory), str(threads)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdout.readline()
            seconds = []
            for _ in range(rounds + 1):
                print("again", file=process.stdin, flush=True)
                seconds.append(float(process.stdout.readline()))
            process.stdin.close()
        best[threads] = min(seconds[1:])
    return best


def show(console: Console, scenario: str, results: dict[int, Results]) -> bool:
    """Print a scenario's results; return whether every bound was met."""
    table = Table(scenario, "concurrent", "TTFT", "TTFA", "E2E", "stages' steps", "CPU", "parent's share")
    for number, result in results.items():
        for name, run in result.runs.items():
            steps = ", ".join(f"{seconds:.2f}" for seconds in run.steps_s.values())
            ttfa = "" if run.ttfa_s is None else f"{run.ttfa_s:.3f} s"
            row = f"{run.ttft_s:.3f} s", ttfa, f"{run.e2e_s:.2f} s", f"{steps} s", f"{run.cpu_s:.2f} s"
            table.add_row(name, str(number), *row, f"{run.parent_cpu:.1%}")
    console.print(table)
    met = True
    for number, result in results.items():
        streamed = result.runs["streamed"]
        if streamed.output_bytes:
            extra = streamed.client_bytes / streamed.output_bytes - 1
            console.print(
                f"{scenario:8} {number:3} concurrent  through the parent: outputs and {extra:.1%} for headers"
            )
        for what, ratio, most in bounds(scenario, result):
            met &= ratio <= most
            verdict = "met" if ratio <= most else "[red]not met[/]"
            console.print(f"{scenario:8} {number:3} concurrent  {what:40} {ratio:.3f}  (<= {most:g})  {verdict}")
        for name, (mean, error) in result.ttft.items():
            console.print(f"{scenario:8} {number:3} concurrent  TTFT, streamed / {name:22} {mean:.3f} ± {error:.3f}")
    return met


@click.command()
@click.option("--rounds", default=3, show_default=True, help="Counted rounds, after one that warms up.")
@click.option("--concurrency", default="1,4,10,32", show_default=True, help="Numbers of concurrent requests.")
@click.option("--only", type=click.Choice(["compute", "waiting"]), help="One of the two scenarios.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write the results to this file.")
def main(rounds: int, concurrency: str, only: str | None, json_file: Path | None) -> None:
    """Measure, print tables, and report which bounds were met."""
    console = Console(width=120)
    numbers = [int(number) for number in concurrency.split(",")]
    written: dict[str, Any] = {}
    met = True
    with tempfile.TemporaryDirectory() as scratch:
        checkpoint = Path(scratch) / "checkpoint"
        scenarios = []
        if only != "compute":
            scenarios.append(pipelines.waiting())
        if only != "waiting":
            scenarios.append(pipelines.compute(checkpoint))
        for scenario in scenarios:
            results = trio.run(measure, scenario, numbers, rounds)
            met &= show(console, scenario.name, results)
            written[scenario.name] = msgspec.to_builtins(results)
        if only != "waiting":
            batch = trio.run(batching.measure, Path(scratch) / "tiny", rounds)
            written["batching"] = msgspec.to_builtins(batch)
            met &= batch.speedup >= SPEEDUP
            console.print(
                f"{batching.REQUESTS} requests, tiny model: sequential {batch.sequence_s:.2f} s, concurrent "
                f"{batch.concurrent_s:.2f} s: {batch.speedup:.2f} times the throughput (>= {SPEEDUP:g})  "
                f"{'met' if batch.speedup >= SPEEDUP else '[red]not met[/]'}"
            )
            written["transformers"] = monolith(checkpoint, rounds)
            for threads, seconds in written["transformers"].items():
                console.print(f"transformers' generate, {threads} thread(s): first sample and end: {seconds:.2f} s")
    if json_file is not None:
        json_file.write_text(json.dumps(written, indent=1))
    sys.exit(0 if met else 1)


if __name__ == "__main__":
    main()
