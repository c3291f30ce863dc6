"""`python -m bench.prefill`: how much long prompts delay the tokens of other requests, in one stage and in two.

Two pipelines of SmolLM2 135M on the same two cores, measured in turn:

one stage   the ``llm`` engine on ``--threads`` threads, which prefills and decodes
two stages  ``configs/text_prefill.yaml``: prefill and decode, on one thread each

With ``--engine vllm`` (in vLLM's environment), both are on vLLM, and two stages are ``configs/text_prefill_vllm.yaml``.

In each window, ``READERS`` requests read answers that do not end, and prompts of ``--prompt`` tokens come in, the next
one when the one before has its answer. A gap is the time between two tokens of a reader, at the client, from the first
long prompt on. The ratios are those of two windows that follow one another; the median of the pairs counts.

Before the windows, both answer prompts of lengths around the edges of blocks. With ``--no-lengths`` they do not, and
with ``--rounds 0`` they do only that.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import click
import numpy as np
import psutil
import trio
from rich.console import Console
from rich.table import Table

from omni_actors import OmniSystem, config
from omni_actors.config import Pipeline, Stage
from omni_actors.stress.report import percentile

READERS, ANSWER = 2, 4
"""Requests that read all the time, and the tokens of the answer to a long prompt."""
BLOCK, COMPARED = 128, 16
"""Positions of a block (``prefill_chunk``), and the tokens of an answer that is compared."""
LENGTHS = (1, 2, *(edge * BLOCK + off for edge in (1, 2, 4, 8) for off in (-1, 0, 1)), 2000)
"""Of the prompts whose answers are compared."""
ONE, TWO = "one stage", "two stages"
BOUND = 0.5
"""The most that the 99th percentile of the gaps may be, with two stages, of that with one."""
Row = dict[str, Any]


def pipelines(engine: str, chunk_layers: int, threads: int) -> dict[str, Pipeline]:
    """Return both pipelines. The one stage has the options of the stage that decodes."""
    if engine == "vllm":
        two = config.load("text_prefill_vllm")
    else:
        two = config.load("text_prefill", {"stages.prefill.options.chunk_layers": chunk_layers})
    decode = two.stages["decode"]
    options = {**decode.options, "role": "both"}
    llm = Stage(
        engine=engine, model=decode.model, accepts=("messages",), emits="text", threads=threads, options=options
    )
    return {ONE: Pipeline(name="text", stages={"llm": llm}), TWO: two}


def prompt(number: int, size: int) -> Row:
    """Return a prompt of its own for each number: random tokens."""
    return {"prompt_token_ids": np.random.default_rng(number).integers(100, 40_000, size).tolist()}


async def answered(omni: OmniSystem, number: int, size: int) -> tuple[float, str]:
    """Ask a long prompt. Return the seconds to the first token, and the text."""
    began, first, text = trio.current_time(), None, ""
    async for output in omni.generate(prompt(number, size), max_tokens=ANSWER, ignore_eos=True, logprobs=0):
        first = first or trio.current_time()
        text += output.delta
    assert first is not None
    return first - began, text


async def compare(systems: dict[str, OmniSystem], sizes: Sequence[int]) -> dict[int, bool]:
    """Return for each length whether the ids of the answers are equal. The ids are those of their log probabilities."""
    found = {}
    for size in sizes:
        answers = {}
        for name, omni in systems.items():
            outputs = omni.generate(prompt(size, size), max_tokens=COMPARED, ignore_eos=True, logprobs=0)
            answers[name] = [
                token[0]["token_id"] async for output in outputs for token in output.data.get("logprobs", ())
            ]
        assert all(len(ids) == COMPARED for ids in answers.values()), answers
        found[size] = answers[ONE] == answers[TWO]
    return found


async def tokens(omni: OmniSystem, number: int) -> AsyncIterator[float]:
    """Yield the time of each token of answers that follow one another."""
    while True:
        async for _ in omni.generate(prompt(number, 16), max_tokens=1500, ignore_eos=True, logprobs=0):
            yield trio.current_time()


async def window(omni: OmniSystem, seconds: float, size: int, first: int) -> Row:
    """Return the gaps of the readers, and how long prompts took. first: the number of the first long prompt."""
    gaps: list[float] = []
    alone: list[float] = []
    took: list[float] = []
    texts: dict[int, str] = {}
    reading = [trio.Event() for _ in range(READERS)]
    is_loaded = False

    async def read(reader: int) -> None:
        last = None
        async for at in tokens(omni, reader):
            if last is not None:
                (gaps if is_loaded else alone).append(at - last)
                reading[reader].set()
            last = at

    async with trio.open_nursery() as nursery:
        for reader in range(READERS):
            nursery.start_soon(read, reader)
        for event in reading:
            await event.wait()
        await trio.sleep(seconds / 4)
        is_loaded, end, number = True, trio.current_time() + seconds, first
        while trio.current_time() < end:
            seconds_to_first, texts[number] = await answered(omni, number, size)
            took.append(seconds_to_first)
            number += 1
        nursery.cancel_scope.cancel()
    return {"gaps_s": gaps, "alone_s": alone, "first_token_s": took, "texts": texts}


async def measure(
    both: dict[str, Pipeline], rounds: int, seconds: float, size: int, sizes: Sequence[int]
) -> tuple[dict[int, bool], dict[str, list[Row]]]:
    """Return whether answers are equal, by length of the prompt, and the windows of each pipeline."""
    found: dict[str, list[Row]] = {ONE: [], TWO: []}
    async with AsyncExitStack() as stack:
        systems = {name: await stack.enter_async_context(OmniSystem.open(each)) for name, each in both.items()}
        lengths = await compare(systems, sizes)
        for n in range(rounds):
            for name in (ONE, TWO) if n % 2 else (TWO, ONE):
                found[name].append(await window(systems[name], seconds, size, 1 + 1000 * n))
    return lengths, found


def p99(row: Row) -> float:
    found = percentile(row["gaps_s"], 99)
    assert found is not None
    return found


def summary(rows: list[Row]) -> Row:
    """Return the figures of all windows of one pipeline, in seconds."""
    gaps = [gap for row in rows for gap in row["gaps_s"]]
    alone = [gap for row in rows for gap in row["alone_s"]]
    first = [each for row in rows for each in row["first_token_s"]]
    return {
        "gap_p50": percentile(gaps, 50),
        "gap_p99": percentile(gaps, 99),
        "gap_max": max(gaps),
        "alone_p50": percentile(alone, 50),
        "gaps": len(gaps),
        "first_token_p50": percentile(first, 50),
        "prompts": len(first),
    }


def compared(found: dict[str, list[Row]]) -> Row:
    """Return the ratios of two stages to one, and how many answers to the same prompt are equal."""
    pairs = list(zip(found[ONE], found[TWO], strict=True))
    both = [(one["texts"][n], two["texts"][n]) for one, two in pairs for n in one["texts"].keys() & two["texts"].keys()]
    return {
        "gap_p99": statistics.median(p99(two) / p99(one) for one, two in pairs),
        "first_token": statistics.median(
            statistics.median(two["first_token_s"]) / statistics.median(one["first_token_s"]) for one, two in pairs
        ),
        "equal": sum(one == two for one, two in both),
        "answers": len(both),
    }


@click.command()
@click.option("--rounds", type=click.IntRange(min=0), default=4, show_default=True, help="Pairs of windows.")
@click.option("--window-s", type=float, default=20.0, show_default=True, help="Seconds of a window.")
@click.option("--prompt", "size", type=click.IntRange(1, 2500), default=2000, show_default=True, help="Tokens.")
@click.option("--engine", type=click.Choice(["llm", "vllm"]), default="llm", show_default=True)
@click.option(
    "--chunk-layers", type=click.IntRange(min=0), default=0, show_default=True, help="Layers in a chunk of llm."
)
@click.option("--threads", type=click.IntRange(min=1), default=2, show_default=True, help="Of the one stage.")
@click.option("--lengths/--no-lengths", "compares", default=True, help="Compare the ids of answers first.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write the figures here.")
def main(
    rounds: int,
    window_s: float,
    size: int,
    engine: str,
    chunk_layers: int,
    threads: int,
    compares: bool,
    json_file: Path | None,
) -> None:
    """Measure, print a table, and exit with 1 if the bound is not met."""
    load = psutil.getloadavg()[0]
    both = pipelines(engine, chunk_layers, threads)
    lengths, found = trio.run(measure, both, rounds, window_s, size, LENGTHS if compares else ())
    differ = [size for size, equal in lengths.items() if not equal]
    console = Console(width=120)
    console.print(
        f"equal ids of {COMPARED} tokens: {len(lengths) - len(differ)} of {len(lengths)} lengths, not at {differ}"
    )
    if not rounds:
        sys.exit(bool(differ))
    ratio, figures = compared(found), {name: summary(rows) for name, rows in found.items()}
    table = Table("", "gap p50", "p99", "longest", "without prompts, p50", "first token of a prompt", "gaps", "prompts")
    for name, row in figures.items():
        times = (f"{1000 * row[key]:.0f} ms" for key in ("gap_p50", "gap_p99", "gap_max", "alone_p50"))
        table.add_row(name, *times, f"{row['first_token_p50']:.2f} s", str(row["gaps"]), str(row["prompts"]))
    console.print(table)
    met = ratio["gap_p99"] <= BOUND
    console.print(f"p99 of two stages / of one: {ratio['gap_p99']:.2f}, bound {BOUND:g}: {'met' if met else 'missed'}")
    console.print(f"first token of a prompt, two stages / one: {ratio['first_token']:.2f}")
    console.print(f"equal answers to the same prompt: {ratio['equal']} of {ratio['answers']}")
    console.print(f"load of the machine before: {load:.1f}")
    if json_file is not None:
        json_file.write_text(
            json.dumps(
                {"lengths": lengths, "ratio": ratio, "figures": figures, "load": load, "windows": found}, indent=1
            )
        )
    if differ or not met:
        sys.exit(1)


if __name__ == "__main__":
    main()
