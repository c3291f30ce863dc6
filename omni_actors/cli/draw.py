"""``omni-actors draw``: a picture of a prompt, as a file."""

from __future__ import annotations

import os
import random
from collections import Counter
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import click
import trio
from rich.console import Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from omni_actors import config as configuration
from omni_actors.cli.running import notes, run, seconds, wait_ready
from omni_actors.cli.terminal_pictures import COLUMNS, ROWS, CoarsePicture, inline_encoder, shows_coarse_pictures
from omni_actors.command_line import (
    PIPELINE,
    BadConfig,
    CannotWrite,
    click_errors,
    override_option,
    require_writable,
    verbose_option,
)
from omni_actors.installed import is_importable
from omni_actors.outputs import PICTURE_SUFFIXES, Output, Picture, RequestMetrics, picture_format, too_large
from omni_actors.system import OmniSystem
from omni_actors.system.pictures import seed_of, sides_of

PREVIEWS = 5
"""On a terminal, the number of steps from one preview to the next."""


@click.command()
@click.argument("prompt")
@click.option(
    "--config",
    "--pipeline",
    "config",
    type=PIPELINE,
    default="shapes",
    show_default=True,
    help="A pipeline or a model.",
)
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    default="picture.png",
    show_default=True,
    help=f"File of the picture: {', '.join(PICTURE_SUFFIXES)}. Several are numbered: cat-1.png, cat-2.png.",
)
@click.option("--size", metavar="WxH", help="Width and height in pixels, 768x512.")
@click.option("--steps", type=click.IntRange(min=1), help="Denoising steps.")
@click.option("--guidance", type=float, help="How strongly the picture follows the prompt.")
@click.option("--negative-prompt", help="What the picture should not show.")
@click.option("--seed", type=int, help="Seed of the noise. Drawn if it is not given.")
@click.option("-n", type=click.IntRange(min=1), default=1, show_default=True, help="Pictures, with consecutive seeds.")
@click.option(
    "--image",
    "images",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    multiple=True,
    help="A picture to start from, or to edit. May be repeated.",
)
@click.option("--strength", type=float, help="Of a picture to start from, how much noise replaces it, up to 1.")
@click.option(
    "--previews",
    type=click.IntRange(min=0),
    help=f"Show a preview after every N steps; by default {PREVIEWS} on a terminal, else none.",
)
@verbose_option
@override_option
def draw(
    prompt: str,
    config: str,
    output: Path,
    n: int,
    images: tuple[Path, ...],
    verbose: bool,
    assignments: tuple[str, ...],
    **params: Any,
) -> None:
    """Draw a picture of PROMPT, and write it to a file. On a terminal with true colours, watch it emerge."""
    if not is_importable("PIL"):
        raise BadConfig("pictures cannot be written: Pillow is not installed (pip install '.[image]' in the clone)")
    with click_errors():
        pipeline = configuration.load(config, configuration.parse_overrides(assignments))
    if n > (most := pipeline.limits.max_requests):
        raise click.BadParameter(f"{n} is more than limits.max_requests, {most}", param_hint="-n")
    _require_pictures_writable(output, n, params["size"])
    if params["seed"] is None and _takes(pipeline, "seed"):
        params["seed"] = random.getrandbits(31)  # so that the report names it
    if params["previews"] is None and _takes(pipeline, "previews") and notes.is_terminal:
        params["previews"] = PREVIEWS
    if _takes(pipeline, "progress") and notes.is_terminal:
        params["progress"] = 1
    arguments = {**params, "n": n, "image": list(images) or None}
    run(partial(_draw, pipeline, prompt, output=output, arguments=arguments), verbose=verbose)


def _require_pictures_writable(output: Path, count: int, size: str | None) -> None:
    """Raise click.BadParameter unless the files of ``count`` requests can be written. size: None if it is not known."""
    if output.suffix.lower() not in PICTURE_SUFFIXES:
        found = f"the suffix {output.suffix!r}" if output.suffix else "no suffix"
        accepted = f"{output} has {found}; accepted are {', '.join(PICTURE_SUFFIXES)}"
        raise click.BadParameter(accepted, param_hint="--output")
    if (sides := sides_of(size)) is not None and (reason := too_large(picture_format(output), *sides)) is not None:
        raise click.BadParameter(reason, param_hint="--output")
    for number in range(1, count + 1):
        require_writable(_numbered(output, number, 1, count))


def _takes(pipeline: configuration.Pipeline, name: str) -> bool:
    """Return whether a stage takes the parameter, as far as that is known of its engine."""
    schemas = (pipeline.spec(stage).params for stage in pipeline.stages)
    return any(schema is None or name in schema.__struct_fields__ for schema in schemas)


async def _draw(pipeline: configuration.Pipeline, prompt: str, *, output: Path, arguments: dict[str, Any]) -> None:
    count, seed = arguments["n"], arguments["seed"]
    finished: Counter[int] = Counter()
    async with OmniSystem.open(pipeline, wait_ready=False) as omni:
        request: partial[Any] = partial(omni.generate, prompt, modalities=("image",), **arguments)
        request().abort()  # a wrong argument ends the command before the models are loaded
        await wait_ready(omni)
        pictures = request()
        for member in pictures.members:
            member.stream.relay(whole=False)  # the frames of a video are made faster than files are written
        with _Display(count) as display:
            async for each in pictures:
                if not finished[each.index]:  # of a video, the first frame is shown
                    display.show(each)
                if isinstance(each.delta, Picture) and each.delta.final:
                    finished[each.index] += 1
                    path = _numbered(output, each.index + 1 if count > 1 else 1, finished[each.index], count)
                    await _save(each.delta, path)
                    notes.print(f"{path}: {each.delta.width} × {each.delta.height}")
                if each.metrics is not None:
                    notes.print(_facts(each.metrics, seed_of(seed, each.index)), style="dim")
                stream = pictures.members[each.index].stream
                stream.delivered(stream.undelivered_bytes)
        display.show_finished()
    if not finished:
        raise click.ClickException("the answer has no picture")


async def _save(picture: Picture, path: Path) -> None:
    """Write a picture. Raises CannotWrite."""
    try:
        await trio.to_thread.run_sync(picture.save, path)
    except (OSError, ValueError) as error:  # ValueError: the picture is too large for the format
        raise CannotWrite(path, error) from error


def _numbered(path: Path, number: int, part: int, count: int) -> Path:
    """Return the file of a request's picture. part: counts the pictures of the request; most requests have one."""
    suffixes = ([f"-{number}"] if count > 1 else []) + ([f"-{part}"] if part > 1 else [])
    return path.with_stem(path.stem + "".join(suffixes))


def _facts(metrics: RequestMetrics, seed: int | None) -> str:
    facts = {"first preview": metrics.preview_s, "picture": metrics.picture_s, "total": metrics.total_s}
    line = "   ".join(f"{name} {seconds(value)}" for name, value in facts.items() if value is not None)
    return line if seed is None else f"{line}   seed {seed}"


class _Display:
    """The progress of each request on standard error and, on a terminal that can, the pictures."""

    def __init__(self, count: int) -> None:
        bar = BarColumn()
        self._progress = Progress(
            TextColumn("{task.description}"), bar, MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn()
        )
        names = [f"picture {number + 1}" for number in range(count)] if count > 1 else ["picture"]
        self._tasks = [self._progress.add_task(name, total=None) for name in names]
        self._live = Live(self._progress, console=notes, transient=True, refresh_per_second=2)
        self._inline = inline_encoder(os.environ) if notes.is_terminal else None
        self._finished: list[Picture] = []

    def __enter__(self) -> _Display:
        if notes.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._live.stop()

    def show(self, output: Output) -> None:
        """Show what an output tells of its request."""
        step, total = output.data.get("step"), output.data.get("total")
        if step is not None:
            self._progress.update(self._tasks[output.index], completed=step, total=total)
        if isinstance(output.delta, Picture):
            self._show_picture(output.delta)

    def _show_picture(self, picture: Picture) -> None:
        """Show a preview above the progress, in place of the one before, and leave a finished picture there."""
        if picture.final and self._inline is not None:
            self._finished.append(picture)
        if not shows_coarse_pictures(notes):
            return
        rows = max(1, notes.height - len(self._tasks) - 2)
        coarse = CoarsePicture(picture, min(COLUMNS, notes.width), min(ROWS, rows))
        self._live.update(self._progress if picture.final else Group(coarse, self._progress), refresh=True)
        if picture.final and self._inline is None:
            notes.print(coarse)

    def show_finished(self) -> None:
        """Show the finished pictures whole, where the terminal can. Call it after the block: it moves the cursor."""
        for picture in self._finished:
            assert self._inline is not None, "finished pictures are kept for it"
            notes.file.write(self._inline(picture) + "\n")
