"""Ask in text and hear the answer, in answer.wav; then see what it took: to the first text and sound, and by stage.

python examples/text_to_speech.py "Tell me a story about the sea." --speaker Chelsie --seed 7
"""

from typing import Any

import click
import soundfile
import trio
from rich import print
from rich.table import Table

from omni_actors import AudioChunk, OmniError, OmniSystem
from omni_actors.generation import RequestMetrics

RATE = 24_000  # Hz: what both omni models speak at


@click.command()
@click.argument("prompt")
@click.option("--config", default="qwen3_omni", show_default=True, help="A pipeline's name or file.")
@click.option("--speaker", help="One of the checkpoint's; Qwen3-Omni has Ethan, Chelsie and Aiden.")
@click.option("--seed", type=int, help="The same seed gives the same speech again.")
@click.option("--max-tokens", type=click.IntRange(min=1), help="Longest answer, in tokens of text.")
def main(prompt: str, config: str, **params: Any) -> None:
    """Answer PROMPT in text and speech."""
    try:
        metrics = trio.run(speak, config, prompt, params)
    except OmniError as error:
        raise click.ClickException(str(error)) from error
    print(summary(metrics), stages(metrics))


async def speak(config: str, prompt: str, params: dict[str, Any]) -> RequestMetrics:
    """Parameters that are None are the pipeline's to decide."""
    async with OmniSystem.open(config) as omni:
        with soundfile.SoundFile("answer.wav", "w", RATE, 1) as wav:
            async for out in omni.generate(prompt, modalities=("text", "audio"), **params):
                if isinstance(out.delta, AudioChunk):
                    wav.write(out.delta.samples)
                elif out.delta is not None:
                    click.echo(out.delta, nl=False)
    click.echo()
    assert out.metrics is not None  # the last output always has them
    return out.metrics


def summary(metrics: RequestMetrics) -> Table:
    table = Table("TTFT", "TTFA", "total", "speech", "RTF", title="The request")
    figures = (metrics.ttft_s, metrics.ttfa_s, metrics.total_s, metrics.audio_s)
    table.add_row(*map(seconds, figures), "–" if metrics.rtf is None else f"{metrics.rtf:.2f}")
    return table


def stages(metrics: RequestMetrics) -> Table:
    table = Table("stage", "first out", "finished", "in steps", "chunks", "sent", title="Its stages")
    for name, stage in metrics.stages.items():
        times = map(seconds, (stage.first_output_s, stage.finished_s, stage.step_s))
        sent = "\n".join(f"{size / 1000:.1f} kB → {consumer}" for consumer, size in stage.sent_bytes.items())
        table.add_row(name, *times, str(stage.chunks), sent)
    return table


def seconds(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f} s"


main()
