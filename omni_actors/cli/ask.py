"""``omni-actors ask``: one question, its answer as text and as a sound file."""

from __future__ import annotations

import io
from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import click
import msgspec
import numpy as np
import soundfile
from rich import filesize
from rich.table import Table

from omni_actors import config as configuration
from omni_actors.cli.running import notes, run, seconds, wait_ready
from omni_actors.command_line import (
    PIPELINE,
    CannotWrite,
    Number,
    click_errors,
    echo_json,
    override_option,
    require_writable,
    verbose_option,
)
from omni_actors.output_files import SOUND_SUFFIXES, SoundWriter
from omni_actors.outputs import AudioChunk, RequestMetrics
from omni_actors.plain_text import clean, escape
from omni_actors.system import OmniSystem

BLOCK = 1 << 18
"""The frames of sound that are decoded at a time."""


@click.command()
@click.argument("question", required=False)
@click.option(
    "--config",
    "--pipeline",
    "config",
    type=PIPELINE,
    default="voice",
    show_default=True,
    help="A pipeline or a model.",
)
@click.option("-a", "--audio", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="A spoken question.")
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    help=f"Sound file of the answer: {', '.join(SOUND_SUFFIXES)}.",
)
@click.option("--max-tokens", type=click.IntRange(min=1), help="Most tokens of the answer.")
@click.option("--temperature", type=Number(0, 2), help="Temperature of sampling; 0 is greedy.")
@click.option("--seed", type=int, help="Seed of sampling and of the voice's noise.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead.")
@verbose_option
@override_option
def ask(
    question: str | None,
    config: str,
    audio: Path | None,
    output: Path | None,
    as_json: bool,
    verbose: bool,
    assignments: tuple[str, ...],
    **params: Any,
) -> None:
    """Ask QUESTION, or the one in --audio. Text is printed, and sound is written, as it is generated."""
    if question is None and audio is None:
        raise click.UsageError("give a QUESTION, or one spoken in --audio FILE")
    if output is not None:
        if output.suffix.lower() not in SOUND_SUFFIXES:
            raise click.BadParameter(f"{output}: accepted are {', '.join(SOUND_SUFFIXES)}", param_hint="--output")
        require_writable(output)
    clip = _read_audio(audio) if audio else None

    with click_errors():
        pipeline = configuration.load(config, configuration.parse_overrides(assignments))
    run(partial(_ask, pipeline, question, clip=clip, output=output, as_json=as_json, params=params), verbose=verbose)


async def _ask(
    pipeline: configuration.Pipeline,
    question: str | None,
    *,
    clip: AudioChunk | None,
    output: Path | None,
    as_json: bool,
    params: dict[str, Any],
) -> None:
    async with OmniSystem.open(pipeline, wait_ready=False) as omni:
        request = partial(
            omni.generate,
            question,
            multi_modal_data={"audio": clip} if clip else None,
            modalities=("text", "audio") if output else ("text",),
            **params,
        )
        request().abort()  # a wrong argument ends the command before the models are loaded
        await wait_ready(omni, quiet=as_json)
        answer = request()
        text: list[str] = []
        failure: CannotWrite | None = None  # of the sound file; the rest of the answer is still printed
        with SoundWriter(output) if output else nullcontext() as sound_file:
            async for out in answer:
                if isinstance(out.delta, str):
                    text.append(out.delta)
                    if not as_json:
                        click.echo(clean(out.delta, keep_lines=True), nl=False)
                elif isinstance(out.delta, AudioChunk) and sound_file is not None and failure is None:
                    try:
                        await sound_file.write(out.delta)
                    except (OSError, soundfile.LibsndfileError) as error:
                        failure = CannotWrite(str(output), error)
        metrics = out.metrics
    assert metrics is not None, "the last output has the metrics"
    if as_json:
        result = {
            "text": "".join(text),
            "output": str(output) if output and metrics.audio_s and failure is None else None,
            "rtf": metrics.rtf,
            "metrics": metrics,
        }
        echo_json(escape(msgspec.json.encode(result).decode()))
    else:
        click.echo()
        _print_metrics(metrics)
        if output and failure is None:
            notes.print(
                f"{output}: {metrics.audio_s:.1f} s of speech" if metrics.audio_s else "the answer has no speech"
            )
    if failure is not None:
        raise failure


def _read_audio(path: Path) -> AudioChunk:
    mono = [np.empty(0, np.float32)]
    try:
        # Without the name, because one that ends with ".raw" would need a rate.
        with soundfile.SoundFile(io.BytesIO(path.read_bytes())) as file:
            # In blocks, because a damaged header may claim more samples than there is memory.
            while len(block := file.read(BLOCK, dtype="float32", always_2d=True)):
                mono.append(block.mean(axis=1))
            rate = file.samplerate
    except soundfile.LibsndfileError as error:
        raise click.BadParameter(f"{path}: {error.error_string}", param_hint="--audio") from error
    return AudioChunk(np.concatenate(mono), rate)


def _print_metrics(metrics: RequestMetrics) -> None:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in ("stage", "first in", "first out", "finished", "in steps", "chunks", "sent"):
        table.add_column(column, justify="left" if column == "stage" else "right")
    table.add_row("(you)", *[""] * 5, _sent(metrics.sent_bytes))
    for name, stage in metrics.stages.items():
        times = [seconds(t) for t in (stage.first_input_s, stage.first_output_s, stage.finished_s, stage.step_s)]
        table.add_row(name, *times, str(stage.chunks), _sent(stage.sent_bytes))
    notes.print(table)
    facts = {"TTFT": metrics.ttft_s, "TTFA": metrics.ttfa_s, "total": metrics.total_s}
    line = "   ".join(f"{name} {seconds(value)}" for name, value in facts.items() if value is not None)
    notes.print(line + (f"   RTF {metrics.rtf:.2f}" if metrics.rtf else ""))


def _sent(sent_bytes: Mapping[str, int]) -> str:
    return "\n".join(
        f"{filesize.decimal(count)} → {consumer.partition('.')[0]}" for consumer, count in sent_bytes.items()
    )
