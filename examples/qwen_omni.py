"""Ask Qwen-Omni about the media in examples/media, or about your own. Each answer goes to a text and a sound file.

python examples/qwen_omni.py --query-type use_mixed_modalities --output-dir answers --enable-stats
python examples/qwen_omni.py --model Qwen/Qwen3-Omni-30B-A3B-Instruct --query-type use_audio_in_video
"""

from pathlib import Path
from typing import Any, NamedTuple

import click
import soundfile
import trio
from rich import print
from rich.table import Table

from omni_actors import Answer, AudioChunk, OmniError, OmniSystem
from omni_actors.outputs import RequestMetrics

MEDIA = Path(__file__).parent / "media"
FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


class Query(NamedTuple):
    """A question, and the kinds of media that come before it."""

    prompt: str
    media: tuple[str, ...] = ()


QUERIES = {
    "text": Query("Why is the sky blue? Answer in one sentence."),
    "use_audio": Query("Answer the question that you hear.", ("audio",)),
    "use_image": Query("What does the image show?", ("image",)),
    "use_video": Query("What happens in the video?", ("video",)),
    "use_multi_audios": Query("Are these two questions about the same thing?", ("audio", "more_audio")),
    "use_mixed_modalities": Query("What is asked, and what do you see?", ("audio", "image", "video")),
    "use_audio_in_video": Query("What happens in the video, and what is asked in it?", ("video",)),
}


@click.command()
@click.option("--model", default="Qwen/Qwen2.5-Omni-7B", show_default=True, help="A model or a pipeline.")
@click.option("--query-type", type=click.Choice(list(QUERIES)), default="use_mixed_modalities", show_default=True)
@click.option("--prompt", help="A question in place of the query's own.")
@click.option("--audio-path", "audio", type=FILE, default=MEDIA / "capital.ogg", help="A recording.")
@click.option("--more-audio-path", "more_audio", type=FILE, default=MEDIA / "weather.ogg", help="A second one.")
@click.option("--image-path", "image", type=FILE, default=MEDIA / "landscape.png", help="An image.")
@click.option("--video-path", "video", type=FILE, default=MEDIA / "sunrise.mp4", help="A video.")
@click.option("--output-dir", type=click.Path(file_okay=False, path_type=Path), default="output", show_default=True)
@click.option("--num-prompts", type=click.IntRange(min=1), default=1, show_default=True, help="How often to ask.")
@click.option("--modalities", default="text,audio", show_default=True, help="What to answer in.")
@click.option("--async-chunk/--no-async-chunk", default=True, show_default=True, help="Whether the stages stream.")
@click.option("--enable-stats", is_flag=True, help="Print the times of each request and of its stages.")
@click.option("--max-tokens", type=click.IntRange(min=1), help="Most tokens of the answer.")
@click.option("--seed", type=int, help="The same seed gives the same speech.")
def main(
    query_type: str, prompt: str | None, output_dir: Path, modalities: str, max_tokens: int | None, **given: Any
) -> None:
    """Ask a query, and write the answers to the output directory."""
    query = QUERIES[query_type]
    arguments: dict[str, Any] = {
        "multi_modal_data": media_of(query, given),
        "modalities": tuple(modalities.split(",")),
        "max_tokens": max_tokens,
        "seed": given["seed"],
    }
    if query_type == "use_audio_in_video":
        arguments["use_audio_in_video"] = True
    prompts = [prompt or query.prompt] * given["num_prompts"]
    output_dir.mkdir(parents=True, exist_ok=True)
    try:
        answers = trio.run(ask, given["model"], given["async_chunk"], prompts, arguments)
    except OmniError as error:
        raise click.ClickException(str(error)) from error
    for answer in answers:
        write(answer, output_dir / f"{answer.index:05}")
        if given["enable_stats"] and answer.metrics is not None:
            print(stats(answer.index, answer.metrics))


def media_of(query: Query, given: dict[str, Any]) -> dict[str, Any]:
    """Return the query's media by kind. Images and videos are passed as files: the thinker's worker decodes them."""
    recordings = [read_audio(given[name]) for name in query.media if name.endswith("audio")]
    files = {name: [given[name]] for name in query.media if not name.endswith("audio")}
    return {"audio": recordings, **files}


def read_audio(path: Path) -> AudioChunk:
    try:
        samples, rate = soundfile.read(path, dtype="float32", always_2d=True)
    except soundfile.SoundFileError as error:
        raise click.ClickException(str(error)) from error
    return AudioChunk(samples.mean(axis=1), rate)


async def ask(model: str, async_chunk: bool, prompts: list[str], arguments: dict[str, Any]) -> list[Answer]:
    """Return the answers in the order of the prompts."""
    async with (
        OmniSystem.open(model, overrides={"async_chunk": async_chunk}) as omni,
        omni.map(prompts, **arguments) as answers,
    ):
        return sorted([answer async for answer in answers], key=lambda answer: answer.index)


def write(answer: Answer, stem: Path) -> None:
    click.echo(answer.text)
    stem.with_suffix(".txt").write_text(answer.text + "\n", encoding="utf-8")
    if answer.audio is not None:
        soundfile.write(stem.with_suffix(".wav"), answer.audio.samples, answer.audio.sample_rate)


def stats(number: int, metrics: RequestMetrics) -> Table:
    """Return the times of a request and of its stages, in seconds since it was submitted."""
    table = Table("", "first out", "finished", "in steps", "chunks", "sent", title=f"Request {number}, in seconds")
    for name, stage in metrics.stages.items():
        times = (stage.first_output_s, stage.finished_s, stage.step_s)
        sent = f"{sum(stage.sent_bytes.values()) / 1000:.1f} kB"
        table.add_row(name, *map(seconds, times), str(stage.chunks), sent)
    table.add_section()
    table.add_row("text", seconds(metrics.ttft_s))
    table.add_row("speech", seconds(metrics.ttfa_s), seconds(metrics.total_s))
    return table


def seconds(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


main()
