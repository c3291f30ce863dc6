"""Pictures from stages in processes, beside diffusers' own pipeline (``python -m bench.images``).

The model is a Qwen-Image with random weights, in two sizes. *tiny*: a step costs the same whatever it computes, as on a
GPU. *busy*: a step computes as long as its pictures are large, as on a CPU. Everything computes on one thread.

alone        one picture at a time: the system, and diffusers' pipeline in this process
guided       eight requests (4 to 50 steps, three sizes, each with a negative prompt) at once, and one after another
half guided  the same, but every second one has no negative prompt

Rounds alternate. A ratio is the median of the rounds' ratios, so that a slow time of the machine counts on both sides.
On a machine that does other work, the ratio of the CPU times of all processes says more; it leaves out waiting.
"""

from __future__ import annotations

import json
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
ALONE_STEPS = 20
BATCHES = ("guided", "half guided")
BOUNDS = {("tiny", "alone"): 1.05, ("tiny", "guided"): 0.6, ("tiny", "half guided"): 0.6}
BOUNDS |= {("busy", case): 1.05 for case in ("alone", *BATCHES)}


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


def mixed(kind: str, case: str) -> list[dict[str, Any]]:
    """Return the arguments of eight requests."""
    guided = range(1, 8, 2) if case == "half guided" else range(8)
    requests: list[dict[str, Any]] = []
    for n, steps in enumerate(STEPS):
        asked: dict[str, Any] = {"steps": steps, "size": SIZES[kind][n % 3], "seed": n}
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


def in_diffusers(pipeline: Any, asked: dict[str, Any]) -> Cost:
    """Return what the same picture costs in diffusers' pipeline, in this process."""
    width, height = map(int, asked["size"].split("x"))
    meter = Meter()
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


async def measure(kind: str, rounds: int) -> dict[str, list[Round]]:
    """Return the costs of each round, by case. A round before them warms up."""
    cases: dict[str, list[Round]] = {case: [] for case in ("alone", *BATCHES)}
    with tempfile.TemporaryDirectory() as directory:
        model = save_model(Path(directory), kind)
        pipeline = QwenImagePipeline.from_pretrained(model)
        pipeline.set_progress_bar_config(disable=True)
        async with opened(model) as omni:
            one = {**mixed(kind, "guided")[1], "steps": ALONE_STEPS}
            for n in range(rounds + 1):
                found = {"alone": {"system": await staged(omni, [one], at_once=False)}}
                found["alone"]["base"] = in_diffusers(pipeline, one)
                for case in BATCHES:
                    requests = mixed(kind, case)
                    found[case] = {"system": await staged(omni, requests, at_once=True)}
                    found[case]["base"] = await staged(omni, requests, at_once=False)
                if n:
                    for case, costs in found.items():
                        cases[case].append(costs)
    return cases


def ratios(rounds: list[Round], field: str) -> list[float]:
    """Return the rounds' ratios of one field of ``Cost``, in increasing order."""
    return sorted(getattr(each["system"], field) / getattr(each["base"], field) for each in rounds)


@click.command()
@click.option("--rounds", type=click.IntRange(min=1), default=7, show_default=True, help="Rounds after a warm-up.")
@click.option("--only", type=click.Choice(list(SIZES)), help="Measure one model only.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write the figures here.")
def main(rounds: int, only: str | None, json_file: Path | None) -> None:
    """Measure, print a table, and exit with 1 if a bound is not met."""
    torch.set_num_threads(1)
    found = {kind: trio.run(measure, kind, rounds) for kind in ([only] if only else SIZES)}
    table = Table("model", "case", "system", "beside", "ratio", "least", "most", "bound", "ratio of CPU times")
    met = True
    for kind, cases in found.items():
        for case, costs in cases.items():
            wall, bound = ratios(costs, "wall_s"), BOUNDS[kind, case]
            middle = statistics.median(wall)
            seconds = [f"{statistics.median(each[side].wall_s for each in costs):.3f} s" for side in ("system", "base")]
            figures = (middle, wall[0], wall[-1], bound, statistics.median(ratios(costs, "cpu_s")))
            table.add_row(kind, case, *seconds, *(f"{figure:.3f}" for figure in figures))
            met = met and middle <= bound
    Console().print(table)
    if json_file is not None:
        json_file.write_text(json.dumps(found, indent=1))
    if not met:
        sys.exit(1)


if __name__ == "__main__":
    main()
