"""Pictures from stages in processes, beside diffusers' own pipeline (``python -m bench.images``).

The model is a Qwen-Image with random weights, in two sizes. *tiny*: a step costs the same whatever it computes, as on a
GPU. *busy*: a step computes as long as its pictures are large, as on a CPU. Everything computes on one thread.

overhead  tiny: one picture at a time, by the system, and by diffusers' pipeline in this process
mixed     tiny: eight requests (4 to 50 steps, three sizes, every second one with a negative prompt) at once, and one
          after another
guided    tiny: the same, each with a negative prompt, which doubles the rows of all forwards
busy      busy: the same requests as in mixed
alone     busy: one picture at a time, as in overhead

Rounds alternate. A ratio is the median of the rounds' ratios, so that a slow time of the machine counts on both sides,
with its standard error. On a machine that does other work, the ratio of the CPU times of all processes says more; it
leaves out waiting.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import click
import msgspec
import psutil
import torch
import trio
from diffusers import QwenImagePipeline
from rich.console import Console
from rich.table import Table

from omni_actors import OmniSystem
from omni_actors.config import load
from tiny_models import qwen_image as tiny

BUSY = {"num_layers": 2, "attention_head_dim": 32, "num_attention_heads": 8, "axes_dims_rope": (16, 8, 8)}
"""What the busy transformer changes in the tiny one's configuration: it has 30 times the parameters."""
SIZES = {"tiny": ("32x32", "48x32", "32x48"), "busy": ("96x96", "128x96", "96x128")}
STEPS = (4, 8, 12, 20, 28, 36, 44, 50)
ALONE_STEPS, PICTURES = 20, 4
"""In a round of ``overhead`` and ``alone``, each side draws so many pictures, one after another, with so many steps."""
CASES = {"overhead": "tiny", "mixed": "tiny", "guided": "tiny", "busy": "busy", "alone": "busy"}
"""The model of each case."""
BOUNDS = {"overhead": 1.05, "mixed": 0.6, "guided": 0.6, "busy": 1.05, "alone": 1.05}


class Cost(NamedTuple):
    """Seconds of wall-clock time, and of CPU time of this process and its workers."""

    wall_s: float
    cpu_s: float


Round = dict[str, Cost]
"""The costs in one round, by what was measured; "base" is what the system is compared with."""


def save_model(directory: Path, kind: str) -> Path:
    """Write a model's checkpoint."""
    tiny.save(directory)
    if kind == "busy":
        tiny.transformer(**BUSY).save_pretrained(directory / "transformer")
    return directory


@asynccontextmanager
async def opened(directory: Path) -> AsyncIterator[OmniSystem]:
    """Open the pipeline on the CPU, each stage on one thread."""
    pipeline = load("qwen_image")
    stages = {}
    for name, stage in pipeline.stages.items():
        options = {**stage.options, "dtype": "float32"} | ({"max_batch": 16} if name == "denoiser" else {})
        changes: dict[str, Any] = {"model": str(directory), "device": "cpu", "threads": 1, "options": options}
        stages[name] = msgspec.structs.replace(stage, **changes)
    async with OmniSystem.open(msgspec.structs.replace(pipeline, stages=stages)) as omni:
        yield omni


def mixed(case: str) -> list[dict[str, Any]]:
    """Return the arguments of eight requests."""
    guided = range(8) if case == "guided" else range(1, 8, 2)
    requests: list[dict[str, Any]] = []
    for n, steps in enumerate(STEPS):
        asked: dict[str, Any] = {"steps": steps, "size": SIZES[CASES[case]][n % 3], "seed": n}
        if n in guided:
            asked |= {"negative_prompt": "blurred", "guidance": 2.0 + n}
        requests.append(asked)
    return requests


async def draw(omni: OmniSystem, asked: dict[str, Any]) -> None:
    """Wait for one picture."""
    await omni.generate("a red fox by the sea", modalities=("image",), **asked).picture()


class Meter:
    """Measures from its creation on."""

    def __init__(self) -> None:
        self._began = self._now()

    def cost(self) -> Cost:
        """Return the cost until now."""
        return Cost(*(now - began for now, began in zip(self._now(), self._began, strict=True)))

    def _now(self) -> Cost:
        me = psutil.Process()
        times = [process.cpu_times() for process in (me, *me.children(recursive=True))]
        return Cost(time.perf_counter(), sum(spent.user + spent.system for spent in times))


async def staged(omni: OmniSystem, requests: list[dict[str, Any]], *, at_once: bool) -> Cost:
    """Return what all these requests cost."""
    meter = Meter()
    if at_once:
        async with trio.open_nursery() as nursery:
            for asked in requests:
                nursery.start_soon(draw, omni, asked)
    else:
        for asked in requests:
            await draw(omni, asked)
    return meter.cost()


def in_diffusers(pipeline: Any, requests: list[dict[str, Any]]) -> Cost:
    """Return what the same pictures cost in diffusers' pipeline, in this process."""
    meter = Meter()
    for asked in requests:
        width, height = map(int, asked["size"].split("x"))
        pipeline(
            "a red fox by the sea",
            negative_prompt=asked.get("negative_prompt"),
            true_cfg_scale=asked.get("guidance", 1.0),
            width=width,
            height=height,
            num_inference_steps=asked["steps"],
            generator=torch.Generator().manual_seed(asked["seed"]),
            output_type="np",
        )
    return meter.cost()


async def compared(case: str, omni: OmniSystem, pipeline: Any) -> Round:
    """Return the costs of a round of a case."""
    requests = mixed(case)
    if case not in ("overhead", "alone"):
        return {side: await staged(omni, requests, at_once=side == "system") for side in ("system", "base")}
    requests = [{**requests[1], "steps": ALONE_STEPS}] * PICTURES
    return {"system": await staged(omni, requests, at_once=False), "base": in_diffusers(pipeline, requests)}


async def measure(kind: str, cases: list[str], rounds: int) -> dict[str, list[Round]]:
    """Return the costs of each round, by case. A round before them warms up."""
    found: dict[str, list[Round]] = {case: [] for case in cases}
    with tempfile.TemporaryDirectory() as directory:
        model = save_model(Path(directory), kind)
        pipeline = QwenImagePipeline.from_pretrained(model)
        pipeline.set_progress_bar_config(disable=True)
        async with opened(model) as omni:
            for n in range(rounds + 1):
                for case in cases:
                    costs = await compared(case, omni, pipeline)
                    if n:
                        found[case].append(costs)
    return found


def ratios(rounds: list[Round], field: str) -> list[float]:
    """Return the rounds' ratios of one field of ``Cost``, in increasing order."""
    return sorted(getattr(each["system"], field) / getattr(each["base"], field) for each in rounds)


def standard_error(values: list[float]) -> float:
    """Return the standard error of the median, as of a normal distribution; infinite for a single value."""
    return math.sqrt(math.pi / 2) * statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.inf


@click.command()
@click.option("--rounds", type=click.IntRange(min=1), default=7, show_default=True, help="Rounds after a warm-up.")
@click.option("--only", type=click.Choice(list(CASES)), multiple=True, help="Measure this case only. May be repeated.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write the figures here.")
def main(rounds: int, only: tuple[str, ...], json_file: Path | None) -> None:
    """Measure, print a table, and exit with 1 if a bound is not met."""
    torch.set_num_threads(1)
    found: dict[str, list[Round]] = {}
    for kind in SIZES:
        if cases := [case for case in only or CASES if CASES[case] == kind]:
            found |= trio.run(measure, kind, cases, rounds)
    load = f"load average of the last 15 minutes: {os.getloadavg()[2]:.1f} on {os.cpu_count()} cores"
    table = Table("case", "system", "beside", "ratio", "±", "least", "most", "bound", "CPU times", caption=load)
    met = True
    for case, costs in found.items():
        wall, bound = ratios(costs, "wall_s"), BOUNDS[case]
        middle = statistics.median(wall)
        seconds = [f"{statistics.median(each[side].wall_s for each in costs):.3f} s" for side in ("system", "base")]
        figures = (middle, standard_error(wall), wall[0], wall[-1], bound, statistics.median(ratios(costs, "cpu_s")))
        table.add_row(case, *seconds, *(f"{figure:.3f}" for figure in figures))
        met = met and middle <= bound
    Console().print(table)
    if json_file is not None:
        json_file.write_text(json.dumps({"load": load, "rounds": found}, indent=1))
    if not met:
        sys.exit(1)


if __name__ == "__main__":
    main()
