"""`omni-actors`: ask a question, serve a pipeline, explain a configuration, prepare models.

What a command answers goes to standard output, what it says about its work to standard error. Exit codes: 0 done,
1 the work failed, 2 it could not be asked for that way, 130 interrupted.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any, TypeVar

import click
import msgspec
import soundfile
import trio
from rich.console import Console
from rich.table import Table

from omni_actors import config as configuration
from omni_actors.command_line import BadConfig, override_option
from omni_actors.errors import ConfigError, OmniError
from omni_actors.generation import AudioChunk, RequestMetrics
from omni_actors.serve.command import serve_command
from omni_actors.stages import assets, memory
from omni_actors.stress.command import stress_command
from omni_actors.system import OmniSystem

INTERRUPTED = 130

T = TypeVar("T")

notes = Console(stderr=True, highlight=False)


@click.group()
@click.version_option(package_name="omni-actors")
def main() -> None:
    """Run pipelines of omni-modality models: text, speech and vision in; text, speech and images out."""


def run(work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run a command's work. Ctrl-C and SIGTERM cancel it: workers stop in order. An error ends it in a sentence."""

    async def until_interrupted() -> tuple[T] | None:
        result: tuple[T] | None = None
        with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_cancel_on_signal, signals, nursery.cancel_scope)
                try:
                    result = (await work(),)
                except Exception as error:  # noqa: BLE001 - raised below as it is, not inside an exception group
                    failure.append(error)
                nursery.cancel_scope.cancel()
        return result

    failure: list[Exception] = []
    try:
        result = trio.run(until_interrupted)
    except KeyboardInterrupt:  # a second Ctrl-C, while the workers were being stopped
        result = None
    if failure:
        raise _as_click(failure[0]) if isinstance(failure[0], OmniError) else failure[0]
    if result is None:
        sys.exit(INTERRUPTED)
    return result[0]


async def _cancel_on_signal(signals: AsyncIterator[int], scope: trio.CancelScope) -> None:
    async for _ in signals:
        notes.print("interrupted", style="yellow")
        scope.cancel()


def _as_click(error: OmniError) -> click.ClickException:
    return BadConfig(str(error)) if isinstance(error, ConfigError) else click.ClickException(str(error))


@main.command()
@click.argument("question", required=False)
@click.option("--config", "config", default="voice", show_default=True, help="A pipeline's name or file.")
@click.option("-a", "--audio", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="A spoken question.")
@click.option(
    "-o", "--output", type=click.Path(dir_okay=False, writable=True, path_type=Path), help="WAV of the answer."
)
@click.option("--max-tokens", type=click.IntRange(min=1), help="Longest answer.")
@click.option("--temperature", type=click.FloatRange(0, 2), help="0 is greedy.")
@click.option("--seed", type=int, help="Of sampling and of the voice's noise.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead.")
@override_option
def ask(
    question: str | None,
    config: str,
    audio: Path | None,
    output: Path | None,
    as_json: bool,
    assignments: tuple[str, ...],
    **params: Any,
) -> None:
    """Ask QUESTION, or the one in --audio; text appears as it is generated, the WAV is written as it is spoken."""
    if question is None and audio is None:
        raise click.UsageError("give a QUESTION, or one spoken in --audio FILE")
    if output is not None and not output.absolute().parent.is_dir():
        raise click.BadParameter(f"there is no directory {output.parent}", param_hint="--output")
    run(lambda: _ask(question, config, audio, output, as_json, assignments, params))


async def _ask(
    question: str | None,
    config: str,
    audio: Path | None,
    output: Path | None,
    as_json: bool,
    assignments: tuple[str, ...],
    params: dict[str, Any],
) -> None:
    pipeline = configuration.load(config, configuration.parse_overrides(assignments))
    clip = _read_audio(audio) if audio else None
    async with OmniSystem.open(pipeline, wait_ready=False) as omni:
        await _wait_ready(omni, quiet=as_json)
        answer = omni.generate(
            question,
            multi_modal_data={"audio": clip} if clip else None,
            modalities=("text", "audio") if output else ("text",),
            **params,
        )
        text: list[str] = []
        with _WavWriter(output) as wav:
            async for out in answer:
                if isinstance(out.delta, str):
                    text.append(out.delta)
                    if not as_json:
                        click.echo(out.delta, nl=False)
                elif out.delta is not None:
                    wav.write(out.delta)
        metrics = out.metrics
    assert metrics is not None, "an answer ends with its metrics"
    if as_json:
        result = {
            "text": "".join(text),
            "output": str(output) if output and metrics.audio_s else None,
            "rtf": metrics.rtf,
            "metrics": metrics,
        }
        click.echo(msgspec.json.encode(result).decode())
    else:
        click.echo()
        _print_metrics(metrics)
        if output:
            notes.print(f"{output}: {metrics.audio_s:.1f} s of speech" if metrics.audio_s else "nothing was spoken")


async def _wait_ready(omni: OmniSystem, *, quiet: bool) -> None:
    """Until every stage is loaded, showing on a terminal what each is doing."""
    began = time.monotonic()
    with notes.status("starting") as status:
        if quiet:
            status.stop()
        while not omni.health().ready and omni.dead_error is None:
            stages = omni.health().stages
            status.update("   ".join(f"[bold]{name}[/] {r.note}" for name, each in stages.items() for r in each))
            await omni.wait_changed()
    await omni.wait_ready()
    if not quiet:
        notes.print(f"{len(omni.pipeline.stages)} stages ready in {time.monotonic() - began:.1f} s", style="dim")


class _WavWriter:
    """A 16-bit mono WAV that is a valid file after every chunk; without a path, nothing."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._file: soundfile.SoundFile | None = None

    def __enter__(self) -> _WavWriter:
        return self

    def write(self, chunk: AudioChunk) -> None:
        if self._path is None:
            return
        if self._file is None:
            self._file = soundfile.SoundFile(self._path, "w", chunk.sample_rate, 1, "PCM_16", format="WAV")
        self._file.write(chunk.samples)
        self._file.flush()

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()


def _read_audio(path: Path) -> AudioChunk:
    try:
        samples, rate = soundfile.read(path, dtype="float32", always_2d=True)
    except soundfile.LibsndfileError as error:
        raise click.BadParameter(f"{path}: {error}", param_hint="--audio") from error
    return AudioChunk(samples.mean(axis=1), rate)


def _print_metrics(metrics: RequestMetrics) -> None:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in ("stage", "first in", "first out", "finished", "in steps", "chunks", "sent"):
        table.add_column(column, justify="left" if column == "stage" else "right")
    table.add_row("(you)", *[""] * 5, _sent(metrics.sent_bytes))
    for name, stage in metrics.stages.items():
        times = [_seconds(t) for t in (stage.first_input_s, stage.first_output_s, stage.finished_s, stage.step_s)]
        table.add_row(name, *times, str(stage.chunks), _sent(stage.sent_bytes))
    notes.print(table)
    facts = {"TTFT": metrics.ttft_s, "TTFA": metrics.ttfa_s, "total": metrics.total_s}
    line = "   ".join(f"{name} {_seconds(value)}" for name, value in facts.items() if value is not None)
    notes.print(line + (f"   RTF {metrics.rtf:.2f}" if metrics.rtf else ""))


def _sent(sent_bytes: Mapping[str, int]) -> str:
    return "\n".join(f"{_size(size)} → {consumer.partition('.')[0]}" for consumer, size in sent_bytes.items())


def _seconds(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f} s"


def _size(count: float) -> str:
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"


@main.group("config")
def config_group() -> None:
    """Look at pipelines."""


@config_group.command("explain")
@click.argument("config", default="voice")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON array of {path, value, origin}.")
@override_option
def explain(config: str, as_json: bool, assignments: tuple[str, ...]) -> None:
    """Print every effective value of CONFIG and where it comes from, then the memory that each stage's worker needs.

    Memory is that of the weights, and of the key/value cache at full use, as the checkpoint's own files say; bytes in
    JSON. Where they do not say, it is null, and the last column says why.
    """
    try:
        overrides = configuration.parse_overrides(assignments)
        rows = configuration.explain(config, overrides)
        needed = _memory(configuration.load(config, overrides))
    except ConfigError as error:
        raise _as_click(error) from error
    if as_json:
        click.echo(msgspec.json.encode(rows + needed).decode())
        return
    shown = [(row.path, msgspec.json.encode(row.value).decode(), row.origin) for row in rows]
    shown += [(row.path, "null" if row.value is None else _size(row.value), row.origin) for row in needed]
    width = max(len(path) for path, _, _ in shown)
    for path, value, origin in shown:
        click.echo(f"{path:{width}}  {value:32}  {origin}")


def _memory(pipeline: configuration.Pipeline) -> list[configuration.Explained]:
    """By stage with a model, in bytes."""
    rows: list[configuration.Explained] = []
    for name, stage in pipeline.stages.items():
        if stage.model is None:
            continue
        place = f"stages.{name}.memory"
        try:
            directory = assets.resolve(stage.model)
            need = memory.count(stage.engine, directory, pipeline.options(name))
        except (assets.ModelNotFound, memory.Uncounted) as error:
            rows.append(configuration.Explained(place, None, str(error)))
        else:
            rows.append(configuration.Explained(f"{place}.weights", need.weights, str(directory)))
            if need.cache is not None:
                rows.append(configuration.Explained(f"{place}.cache", need.cache, str(directory / "config.json")))
    return rows


@config_group.command("list")
def list_configs() -> None:
    """Print the names of the pipelines that ship with omni_actors."""
    for name in configuration.config_names():
        click.echo(f"{name:12}  {configuration.load(name).description}")


@main.command()
@click.argument("names", nargs=-1, required=True)
def prepare(names: tuple[str, ...]) -> None:
    """Make the models of pipelines (or models) NAMES ready: find, download, or convert once what needs it."""
    try:
        for name in names:
            for model in [name] if assets.names_a_model(name) else _models_of(name):
                if not assets.is_ready(model):
                    began = time.monotonic()
                    assets.prepare(model, lambda note, model=model: notes.print(f"{model}: {note}"))  # type: ignore[misc]
                    notes.print(f"{model}: ready after {time.monotonic() - began:.0f} s")
    except assets.ModelNotFound as error:
        raise click.ClickException(str(error)) from error


def _models_of(config: str) -> list[str]:
    try:
        return [stage.model for stage in configuration.load(config).stages.values() if stage.model]
    except ConfigError as error:
        raise _as_click(error) from error


main.add_command(serve_command, "serve")
main.add_command(stress_command, "stress")
