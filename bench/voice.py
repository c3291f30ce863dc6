"""`python -m bench.voice`: the voice pipeline against the same models in one process, and batching against a sequence.

Rounds alternate between the system and the chain, so that a machine whose speed drifts is the same for both. The chain
runs in a process of its own (``bench.chain``), once with one native thread and once with two; the system is compared
with the better of the two, round by round: the median of the rounds' ratios, and its standard error. Other ratios are
of medians.
"""

from __future__ import annotations

import json
import math
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import click
import trio
from rich.console import Console
from rich.table import Table

from bench.questions import QUESTIONS
from omni_actors import OmniSystem
from omni_actors.config import load, parse_overrides

QUESTION = "Write three sentences about the sea."
MAX_TOKENS = 256
BATCH_TOKENS = 48
BATCH_ROUNDS = 5

Row = dict[str, Any]


class Chain:
    """The single-process baseline, loaded and idle."""

    def __init__(self, threads: int) -> None:
        command = [sys.executable, "-m", "bench.chain", str(threads)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._read()

    def ask(self, question: str) -> Row:
        assert self._process.stdin is not None
        print(question, file=self._process.stdin, flush=True)
        row: Row = json.loads(self._read())
        return row

    def _read(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the chain ended with code {self._process.wait()}")
        return line

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


async def ask(omni: OmniSystem, question: str) -> Row:
    """Time one question through the system, as the client sees it."""
    began = time.monotonic()
    row: Row = {"text": "", "audio_s": 0.0}
    answer = omni.generate(question, modalities=("text", "audio"), max_tokens=MAX_TOKENS)
    async for out in answer:
        now = time.monotonic() - began
        if isinstance(out.delta, str):
            row["text"] += out.delta
            row.setdefault("ttft_s", now)
            row["last_token_s"] = now
        elif out.delta is not None:
            row.setdefault("ttfa_s", now)
            row["audio_s"] += out.delta.duration_s
        row["total_s"] = now
    return row


async def text_of(omni: OmniSystem, question: str) -> str:
    deltas = [out.delta async for out in omni.generate(question, max_tokens=BATCH_TOKENS)]
    return "".join(delta for delta in deltas if isinstance(delta, str))


async def batching(omni: OmniSystem) -> Row:
    """Time eight questions one after the other and all at once. The answers must be the same."""
    began = time.monotonic()
    alone = [await text_of(omni, question) for question in QUESTIONS]
    sequence_s = time.monotonic() - began
    together: dict[str, str] = {}

    async def one(question: str) -> None:
        together[question] = await text_of(omni, question)

    began = time.monotonic()
    async with trio.open_nursery() as nursery:
        for question in QUESTIONS:
            nursery.start_soon(one, question)
    batch_s = time.monotonic() - began
    same = [together[question] for question in QUESTIONS] == alone
    return {"sequence_s": sequence_s, "batch_s": batch_s, "same_text": same}


async def measure(rounds: int, overrides: dict[str, Any]) -> Row:
    chains = {threads: Chain(threads) for threads in (1, 2)}
    ours: list[Row] = []
    theirs: dict[int, list[Row]] = {threads: [] for threads in chains}
    try:
        async with OmniSystem.open(load("voice", overrides)) as omni:
            for number in range(rounds + 1):
                row = await ask(omni, QUESTION)
                others = {
                    threads: await trio.to_thread.run_sync(chain.ask, QUESTION) for threads, chain in chains.items()
                }
                if number == 0:
                    continue  # the warm-up round
                ours.append(row)
                for threads, other in others.items():
                    theirs[threads].append(other)
            batches = [await batching(omni) for _ in range(BATCH_ROUNDS)]
    finally:
        for chain in chains.values():
            chain.close()
    return {
        "system": medians(ours),
        "ratios": {key: ratio(ours, theirs, key) for key in ("total_s", "ttfa_s")},
        "chains": {str(threads): medians(rows) for threads, rows in theirs.items()},
        "batching": {**medians(batches), "same_text": all(row["same_text"] for row in batches)},
        "text": ours[0]["text"],
        "same_text_as_chain": all(row["text"] == ours[0]["text"] for rows in theirs.values() for row in rows),
        "rounds": rounds,
    }


def medians(rows: list[Row]) -> Row:
    return {key: statistics.median(row[key] for row in rows) for key in rows[0] if key.endswith("_s")}


def ratio(ours: list[Row], theirs: dict[int, list[Row]], key: str) -> tuple[float, float]:
    """Return the median of the ratios to the better baseline, and its standard error."""
    best = min(theirs.values(), key=lambda rows: statistics.median(row[key] for row in rows))
    ratios = [row[key] / other[key] for row, other in zip(ours, best, strict=True)]
    # For a normal distribution, the median's error is sqrt(pi / 2) times the mean's.
    return statistics.median(ratios), statistics.stdev(ratios) * math.sqrt(math.pi / 2 / len(ratios))


def verdicts(result: Row) -> list[tuple[str, float, str, bool]]:
    """Return rows of (name, ratio, bound, met)."""
    ours, batch, best = result["system"], result["batching"], result["ratios"]
    bounds = [
        ("TTFA / time to the last token", ours["ttfa_s"] / ours["last_token_s"], 0.5),
        ("RTF (total / audio)", ours["total_s"] / ours["audio_s"], 0.5),
        ("total / best single process", best["total_s"][0], 1.0),
        ("TTFA / best single process", best["ttfa_s"][0], 1.1),
        ("8 at once / 8 in sequence", batch["batch_s"] / batch["sequence_s"], 0.5),
    ]
    return [(what, found, f"< {bound:g}", found < bound) for what, found, bound in bounds]


@click.command()
@click.option(
    "--rounds",
    type=click.IntRange(min=2),
    default=20,
    show_default=True,
    help="Counted rounds, after one that warms up.",
)
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write the figures here.")
@click.option(
    "-s", "--set", "assignments", multiple=True, metavar="PATH=VALUE", help="Override a value of the pipeline."
)
def main(rounds: int, json_file: Path | None, assignments: tuple[str, ...]) -> None:
    """Measure, print tables, and print which bounds are met."""
    result = trio.run(measure, rounds, parse_overrides(assignments))
    console = Console()
    console.print(f"[dim]{QUESTION}[/]\n{result['text']}\n")
    table = Table("medians of " + str(rounds), "TTFT", "TTFA", "last token", "total", "audio")
    rows = {"system": result["system"]} | {f"one process, {n} thread(s)": row for n, row in result["chains"].items()}
    for name, row in rows.items():
        columns = ("ttft_s", "ttfa_s", "last_token_s", "total_s", "audio_s")
        table.add_row(name, *(f"{row[column]:.2f} s" for column in columns))
    console.print(table)
    for what, found, bound, met in verdicts(result):
        console.print(f"{what:32} {found:.3f}  ({bound})  {'met' if met else '[red]not met[/]'}")
    errors = ", ".join(f"{key.removesuffix('_s')} {error:.3f}" for key, (_, error) in result["ratios"].items())
    console.print(f"standard errors of the ratios to one process: {errors}")
    console.print(f"texts: batch = alone: {result['batching']['same_text']}; = chain: {result['same_text_as_chain']}")
    if json_file is not None:
        json_file.write_text(json.dumps(result, indent=1))
    if not all(met for *_, met in verdicts(result)):
        sys.exit(1)


if __name__ == "__main__":
    main()
