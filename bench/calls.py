"""`python -m bench.calls`: answers of the control plane while all stages compute, and what calls cost the requests.

The pipelines have the stages of shipped ones, each with an engine that computes for ``STEP_S`` in a step on one thread
and repeats its input. ``REQUESTS`` requests are in flight at any time.

answers     ``check_health`` and ``list_loras`` every 10 ms, from the moment at which a call is due to its answer
throughput  outputs a second in windows without calls and with ``RATES`` calls a second, in turn: ``check_health``,
            ``list_loras``, and ``worker_status`` of every engine. A ratio is the median of the pairs' ratios. The
            bound is for the lowest rate; the others say what a call costs.
frozen      ``worker_status`` of each stage while the worker of one stage is stopped (SIGSTOP)
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import click
import psutil
import trio
from rich.console import Console
from rich.table import Table

from omni_actors import OmniSystem, config
from omni_actors.config import Limits, Pipeline, Stage
from omni_actors.errors import CallTimedOut
from omni_actors.orchestrator.pieces import Input
from omni_actors.stress.report import percentile
from tests.support.frozen import freeze

SHAPES: dict[str, tuple[str, str]] = {"voice": ("audio", "audio"), "qwen3_omni": ("messages", "audio")}
"""The shipped pipelines, with the input and the modality of the requests."""
STEP_S, EVERY_S = 0.002, 0.01
RATES = (10, 100)
"""Calls a second beside which the outputs are counted."""
REQUESTS, PIECES = 16, 50
WARM_UP_S, TIMEOUT_S, FROZEN_CALLS = 1.0, 0.5, 6
ANSWER_BOUND_S, RATIO_BOUND = 0.05, 0.97
OTHERS_BOUND = 0.5
"""The most of the timeout that a stage beside a frozen one may take to answer."""
TIMED_OUT = CallTimedOut.__name__
Call = Callable[[OmniSystem], Awaitable[object]]
Row = dict[str, Any]


async def list_loras(omni: OmniSystem) -> object:
    return omni.list_loras()


async def worker_status(omni: OmniSystem) -> object:
    return await omni.call("worker_status", timeout_s=TIMEOUT_S)


PARENTS: dict[str, Call] = {"check_health": OmniSystem.check_health, "list_loras": list_loras}
"""What the parent answers."""
CALLS: dict[str, Call] = {**PARENTS, "worker_status": worker_status}


def pipeline(name: str) -> Pipeline:
    """The stages of a shipped pipeline that its requests use, with engines that compute."""
    kind, _ = SHAPES[name]
    computing: Row = {"engine": "echo", "threads": 1, "options": {"step_s": STEP_S, "spin": True}}
    stages, used = {}, set[str]()
    for each, stage in config.load(name).stages.items():
        accepts, inputs = tuple({kind} & {*stage.accepts}), tuple(source for source in stage.inputs if source in used)
        if accepts or inputs:
            used.add(each)
            stages[each] = Stage(accepts=accepts, inputs=inputs, emits=stage.emits, **computing)
    return Pipeline(name=name, stages=stages, limits=Limits(max_requests=2 * REQUESTS))


class Load:
    """Keeps requests in flight, and counts their outputs."""

    def __init__(self, omni: OmniSystem, name: str) -> None:
        self._omni, (kind, modality) = omni, SHAPES[name]
        self._inputs, self._modalities = {kind: [Input({"n": n}) for n in range(PIECES)]}, (modality,)
        self.outputs = 0

    async def keep_asking(self) -> None:
        while True:
            async for _ in self._omni.submit(self._inputs, self._modalities):
                self.outputs += 1


@asynccontextmanager
async def saturated(name: str) -> AsyncIterator[tuple[OmniSystem, Load]]:
    """Open the pipeline with all of its requests in flight."""
    async with OmniSystem.open(pipeline(name)) as omni, trio.open_nursery() as nursery:
        load = Load(omni, name)
        for _ in range(REQUESTS):
            nursery.start_soon(load.keep_asking)
        await trio.sleep(WARM_UP_S)
        yield omni, load
        nursery.cancel_scope.cancel()


async def answers(omni: OmniSystem, calls: dict[str, Call], every_s: float, until: float) -> dict[str, list[float]]:
    """Make a call every ``every_s``, each kind in turn. Return the seconds from when each was due to its answer."""
    took: dict[str, list[float]] = {name: [] for name in calls}

    async def ask(name: str, due: float) -> None:
        await calls[name](omni)
        took[name].append(trio.current_time() - due)

    due = trio.current_time()
    async with trio.open_nursery() as nursery:
        for name in itertools.cycle(calls):
            due += every_s
            if due >= until:
                break
            await trio.sleep_until(due)
            nursery.start_soon(ask, name, due)
    return took


async def outputs_a_second(omni: OmniSystem, load: Load, seconds: float, calls: int) -> float:
    """Return how many outputs come in a second, in a window of ``seconds`` with so many ``calls`` a second."""
    before, began = load.outputs, trio.current_time()
    if calls:
        await answers(omni, CALLS, 1 / calls, began + seconds)
    await trio.sleep_until(began + seconds)
    return (load.outputs - before) / (trio.current_time() - began)


async def frozen(omni: OmniSystem, stopped: str) -> Row:
    """Stop the worker of a stage for some calls. Return the replies by stage, and the longest wait beside it."""
    (replica,) = omni.health().stages[stopped]
    assert replica.pid is not None
    worker, others_s = psutil.Process(replica.pid), 0.0
    replies = {stage: Counter[str]() for stage in omni.pipeline.stages}

    async def ask(stage: str) -> None:
        nonlocal others_s
        began = time.monotonic()
        (reply,) = (await omni.call("worker_status", stages=(stage,), timeout_s=TIMEOUT_S))[stage]
        replies[stage][type(reply.error).__name__ if reply.error else "value"] += 1
        if stage != stopped:
            others_s = max(others_s, time.monotonic() - began)

    freeze(worker.pid)
    try:
        for _ in range(FROZEN_CALLS):
            async with trio.open_nursery() as nursery:
                for stage in omni.pipeline.stages:
                    nursery.start_soon(ask, stage)
    finally:
        worker.resume()
    return {"stage": stopped, "replies": replies, "others_s": others_s}


async def measure(name: str, rounds: int, window_s: float) -> Row:
    """Return the figures of one pipeline."""
    async with saturated(name) as (omni, load):
        took = await answers(omni, PARENTS, EVERY_S, trio.current_time() + rounds * window_s)
        pairs: dict[int, list[tuple[float, float]]] = {calls: [] for calls in RATES}
        for n, calls in itertools.product(range(rounds), RATES):
            found = {}
            for each in (calls, 0) if n % 2 else (0, calls):
                found[each] = await outputs_a_second(omni, load, window_s, each)
            pairs[calls].append((found[0], found[calls]))
        return {
            "answers_s": took,
            "outputs_a_second": pairs,
            "frozen": await frozen(omni, list(omni.pipeline.stages)[len(omni.pipeline.stages) // 2]),
        }


def checks(name: str, row: Row) -> list[tuple[str, str, str, str, bool]]:
    """Return a line of the table for each bound: pipeline, what, measured, bound, and whether it is met."""
    lines = []
    for call, took in row["answers_s"].items():
        p50, p99 = percentile(took, 50), percentile(took, 99)
        assert p50 is not None
        assert p99 is not None
        shown = f"{1000 * p50:.1f} / {1000 * p99:.1f} ms of {len(took)}"
        lines.append((name, f"{call}, p50 / p99", shown, f"p99 ≤ {1000 * ANSWER_BOUND_S:g} ms", p99 <= ANSWER_BOUND_S))
    for calls, pairs in row["outputs_a_second"].items():
        rate, ratio = statistics.median(alone for alone, _ in pairs), statistics.median(b / a for a, b in pairs)
        what, shown = f"outputs beside {calls} calls a second", f"{ratio:.3f} of {rate:.0f} a second"
        bounded = calls == RATES[0]
        bound = f"≥ {RATIO_BOUND:g}" if bounded else ""
        lines.append((name, what, shown, bound, not bounded or ratio >= RATIO_BOUND))
    still = row["frozen"]
    expected = {each: {TIMED_OUT if each == still["stage"] else "value": FROZEN_CALLS} for each in still["replies"]}
    shown = ", ".join(f"{each}: {dict(replies)}" for each, replies in still["replies"].items() if TIMED_OUT in replies)
    alone = still["replies"] == expected
    lines.append((name, f"{still['stage']} frozen", shown, f"times out alone, {FROZEN_CALLS} times", alone))
    quick, bound_s = still["others_s"], OTHERS_BOUND * TIMEOUT_S
    lines.append(
        (name, "and the others answer", f"{1000 * quick:.1f} ms at most", f"≤ {1000 * bound_s:g} ms", quick <= bound_s)
    )
    return lines


@click.command()
@click.option("--rounds", type=click.IntRange(min=1), default=10, show_default=True, help="Pairs of windows.")
@click.option("--window-s", type=float, default=3.0, show_default=True, help="Seconds of a window.")
@click.option("--only", type=click.Choice(list(SHAPES)), help="Measure one pipeline only.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write the figures here.")
def main(rounds: int, window_s: float, only: str | None, json_file: Path | None) -> None:
    """Measure, print a table, and exit with 1 if a bound is not met."""
    load = psutil.getloadavg()[0]
    found = {name: trio.run(measure, name, rounds, window_s) for name in ([only] if only else SHAPES)}
    table = Table("stages of", "what", "measured", "bound", "")
    lines = [line for name, row in found.items() for line in checks(name, row)]
    for *cells, met in lines:
        table.add_row(*cells, ("met" if met else "missed") if cells[-1] else "")
    console = Console()
    console.print(table)
    console.print(f"load of the machine before: {load:.1f}")
    if json_file is not None:
        json_file.write_text(json.dumps(found, indent=1))
    if not all(met for *_, met in lines):
        sys.exit(1)


if __name__ == "__main__":
    main()
