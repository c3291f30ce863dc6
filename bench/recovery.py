"""`python -m bench.recovery`: what the death of a worker costs a client, in silence and in time to the next token.

Silence: systems that differ only in what takes over after a death (``TAKEOVERS``) answer the same request in turn,
undisturbed and then with a SIGKILL of each mortal stage at a drawn chunk of sound. The silence that a death adds is the
largest excess of a pause between two chunks of sound over the median of the same pause in undisturbed answers.

Tokens: a standby takes over from a language model that is killed after some tokens. One system resumes; the other has
the same engine, declared deterministic instead of resumable, and repeats.

On vLLM (`.venv-vllm/bin/python -m bench.recovery --only vllm`): the same with the engine ``vllm``.

Each worker has one native thread. One system computes at a time, and each answer begins when every worker is ready.
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import click
import msgspec
import numpy as np
import trio
from rich.console import Console
from rich.table import Table

from bench.voice import QUESTION, Row
from omni_actors import AudioChunk, OmniSystem, config
from omni_actors.config import Pipeline, Restart, Stage
from omni_actors.generation import Generation
from omni_actors.protocol.messages import Address
from omni_actors.stress.report import percentile

COLD, UNDISTURBED, REPEAT = "cold restart", "no death", "repeat"
TAKEOVERS: dict[str, Row] = {COLD: {}, "standby: 1": {"standby": 1}, "replicas: 2": {"replicas": 2}}
MODES: dict[str, Row] = {"resume": {}, REPEAT: {"resumable": False, "deterministic": True}}
KINDS = ("echo", "voice", "omni", "tokens")
STORY = "Write a very long story about the sea."
RESTART = Restart(intensity=1_000_000, backoff_max_s=Restart().backoff_s)  # each death counts as the first one


class Subject(NamedTuple):
    """A pipeline that speaks, a request to it, and the stages to kill."""

    pipeline: Pipeline
    request: Row
    mortal: tuple[str, ...]


class Heard(NamedTuple):
    """When each chunk of sound arrived, with its duration, in seconds."""

    sound: list[tuple[float, float]]

    @property
    def pauses_s(self) -> list[float]:
        return [after - before for (before, _), (after, _) in itertools.pairwise(self.sound)]

    @property
    def underrun_s(self) -> float:
        """How long a player that starts with the first chunk has nothing to play."""
        silent_s, plays_until = 0.0, self.sound[0][0]
        for arrived, duration_s in self.sound:
            silent_s += max(0.0, arrived - plays_until)
            plays_until = max(plays_until, arrived) + duration_s
        return silent_s


def subject(kind: str, directory: Path) -> Subject:
    """Return a pipeline to measure silence on. directory: for a checkpoint."""
    speak: Row = {"modalities": ("text", "audio")}
    if kind == "voice":
        request = {**speak, "prompt": QUESTION, "max_tokens": 48}
        return Subject(config.load("voice"), request, ("llm", "vocoder"))
    if kind == "omni":
        from bench.omni import pipelines  # loads torch here

        stages = pipelines.compute(directory / "checkpoint").pipeline(streamed=True).stages
        lengths = {"max_tokens": 60, "talker_max_tokens": 61, "talker_temperature": 0.0}  # 4.8 s of sound
        request = {**speak, **lengths, "prompt": pipelines.PROMPT}
        return Subject(Pipeline(name=kind, stages=stages), request, ("thinker", "code2wav"))
    stages = {
        "source": Stage(engine="echo", accepts=("audio",), options={"fan_out": 40, "step_s": 0.02}),
        "middle": Stage(engine="echo", inputs=("source",)),
        "sink": Stage(engine="echo", inputs=("middle",), emits="audio"),
    }
    sound = {"audio": AudioChunk(np.zeros(2400, np.float32), 24_000)}
    request = {"multi_modal_data": sound, "modalities": ("audio",)}
    return Subject(Pipeline(name=kind, stages=stages), request, ("middle",))


@asynccontextmanager
async def systems(
    pipeline: Pipeline, mortal: Collection[str], variants: Mapping[str, Row]
) -> AsyncIterator[dict[str, OmniSystem]]:
    """Open a system for each variant: changes to the mortal stages."""
    opened: dict[str, OmniSystem] = {}
    async with AsyncExitStack() as stack:
        for name, changes in variants.items():
            stages = {each: msgspec.structs.replace(stage, threads=1) for each, stage in pipeline.stages.items()}
            changed = {"replicas": 1, "restart": RESTART, **changes}
            stages |= {each: msgspec.structs.replace(stages[each], **changed) for each in mortal}
            opening = OmniSystem.open(msgspec.structs.replace(pipeline, stages=stages))
            opened[name] = await stack.enter_async_context(opening)
        gc.collect()
        gc.freeze()  # collecting the objects of the libraries takes 0.2 s
        yield opened


def kill(system: OmniSystem, answer: Generation, stage: str) -> Address:
    """Send SIGKILL to the worker of ``stage`` that holds the request. Returns the address of its replica."""
    address = answer.stream.request.replay_state.placement[stage]
    [pid] = [each.pid for each in system.health().stages[stage] if each.replica == address.replica]
    assert pid is not None, "it holds the request"
    os.kill(pid, signal.SIGKILL)
    return address


async def listen(system: OmniSystem, what: Subject, stage: str = "", at: int = 0) -> Heard:
    """Read an answer to its end. stage: the one to kill when chunk number ``at`` of its sound arrives."""
    await system.wait_ready()
    answer, heard = system.generate(**what.request), Heard([])
    async for output in answer:
        if isinstance(output.delta, AudioChunk):
            heard.sound.append((time.monotonic(), output.delta.duration_s))
            if stage and len(heard.sound) == at:
                kill(system, answer, stage)
    return heard


async def measure_silence(what: Subject, rounds: int) -> list[Row]:
    """Return a row for each stage and takeover, with a value for each of ``rounds`` deaths."""
    draw = random.Random(1)
    heard: defaultdict[tuple[str, str], list[Heard]] = defaultdict(list)
    async with systems(what.pipeline, what.mortal, TAKEOVERS) as opened:
        for system in opened.values():
            await listen(system, what)
        for _ in range(rounds):
            share = draw.uniform(0.0, 0.4)  # the same moment for all; the stages upstream have not finished
            for takeover, system in opened.items():
                whole = await listen(system, what)
                heard[UNDISTURBED, takeover].append(whole)
                for stage in what.mortal:
                    at = 1 + int(share * len(whole.sound))
                    heard[stage, takeover].append(await listen(system, what, stage, at))
    return [
        {
            "pipeline": what.pipeline.name,
            "stage": stage,
            "takeover": takeover,
            "added_s": [added_s(one, heard[UNDISTURBED, takeover]) for one in some],
            "underrun_s": [one.underrun_s for one in some],
        }
        for (stage, takeover), some in heard.items()
    ]


def added_s(one: Heard, undisturbed: Sequence[Heard]) -> float:
    """Return the largest excess of a pause over the median of the same pause in undisturbed answers, in seconds."""
    usual = map(statistics.median, zip(*(each.pauses_s for each in undisturbed), strict=False))
    return float(max(pause - normal for pause, normal in zip(one.pauses_s, usual, strict=False)))


async def next_token_s(system: OmniSystem, tokens: int) -> float:
    """Kill the language model after ``tokens`` pieces of text. Return the time until the next one, in seconds."""
    await system.wait_ready()
    count, killed_at, victim = 0, 0.0, None
    answer = system.generate(STORY, max_tokens=2 * tokens + 32, min_tokens=2 * tokens + 32)
    async for output in answer:
        count += isinstance(output.delta, str)
        if victim is None and count == tokens:
            killed_at, victim = time.monotonic(), kill(system, answer, "llm")
        elif victim is not None and answer.stream.request.replay_state.placement.get("llm") not in (None, victim):
            answer.abort()
            return time.monotonic() - killed_at
    raise RuntimeError(f"the answer ended after {count} pieces of text")


async def measure_tokens(pipeline: str, counts: Sequence[int], rounds: int) -> list[Row]:
    """Return a row for each number of tokens and mode, with a value for each of ``rounds`` deaths.

    pipeline: the one that has the language model.
    """
    llm = msgspec.structs.replace(config.load(pipeline).stages["llm"], inputs=(), standby=1)
    rows: list[Row] = [{"tokens": count, "mode": mode, "next_s": []} for count in counts for mode in MODES]
    async with systems(Pipeline(name="text", stages={"llm": llm}), ["llm"], MODES) as opened:
        for system in opened.values():
            await next_token_s(system, min(counts))
        for _ in range(rounds):
            for row in rows:
                row["next_s"].append(await next_token_s(opened[row["mode"]], row["tokens"]))
    return rows


def show(console: Console, rows: Sequence[Row], names: Sequence[str], base: str) -> bool:
    """Print percentiles, and ratios of medians to the row whose last name is ``base``. Return whether all are < 1.

    names: keys of a row; rows are compared if all but the last are equal.
    """
    figures = [key for key in rows[0] if key.endswith("_s")]
    table = Table(*names, "N", *(f"{key}, p50 / p99" for key in figures), f"{figures[0]} / {base}")
    held = True
    for row in rows:
        found = {**row, names[-1]: base}
        [reference] = [each for each in rows if all(each[name] == found[name] for name in names)]
        ratio = statistics.median(row[figures[0]]) / (statistics.median(reference[figures[0]]) or float("nan"))
        held &= row is reference or row.get("stage") == UNDISTURBED or ratio < 1
        shown = [f"{percentile(row[key], 50):.3f} / {percentile(row[key], 99):.3f}" for key in figures]
        table.add_row(*(str(row[name]) for name in names), str(len(row[figures[0]])), *shown, f"{ratio:.3f}")
    console.print(table)
    return held


@click.command()
@click.option("--rounds", default=12, show_default=True, help="Deaths of each stage, with each takeover or mode.")
@click.option(
    "--only", multiple=True, type=click.Choice((*KINDS, "vllm")), help="One kind of measurement; may be repeated."
)
@click.option("--tokens", default="10,100,400", show_default=True, help="Pieces of text before a death.")
@click.option("--quick", is_flag=True, help="One round without models, and no bounds: does everything work?")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write all values to this file.")
def main(rounds: int, only: tuple[str, ...], tokens: str, quick: bool, json_file: Path | None) -> None:
    """Measure, print tables, and report whether every takeover and every resumption took less time than without it."""
    console, rounds = Console(width=150), 1 if quick else rounds
    silence: list[Row] = []
    waits: list[Row] = []
    on_vllm: list[Row] = []
    with tempfile.TemporaryDirectory() as directory:
        for kind in only or (KINDS[:1] if quick else KINDS):
            print(f"{kind}: load {os.getloadavg()[0]:.1f}", file=sys.stderr)
            counts = [int(count) for count in tokens.split(",")]
            if kind == "tokens":
                waits = trio.run(measure_tokens, "voice", counts, rounds)
            elif kind == "vllm":
                on_vllm = trio.run(measure_tokens, "voice_vllm", counts, rounds)
            else:
                silence += trio.run(measure_silence, subject(kind, Path(directory)), rounds)
    held = not silence or show(console, silence, ("pipeline", "stage", "takeover"), COLD)
    held &= not waits or show(console, waits, ("tokens", "mode"), REPEAT)
    held &= not on_vllm or show(console, on_vllm, ("tokens", "mode"), REPEAT)
    if json_file is not None:
        json_file.write_text(json.dumps({"silence": silence, "tokens": waits, "vllm": on_vllm}, indent=1))
    sys.exit(0 if held or quick else 1)


if __name__ == "__main__":
    main()
