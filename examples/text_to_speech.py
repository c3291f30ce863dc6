"""Ask in text, get the answer as speech in answer.wav, and print the times of the request and of each stage.

python examples/text_to_speech.py "Tell me a story about the sea." --speaker Chelsie --seed 7
"""

from typing import Any

import click
import trio
from rich import print
from rich.table import Table

from omni_actors import AudioChunk, OmniError, OmniSystem
from omni_actors.output_files import SoundWriter
from omni_actors.outputs import RequestMetrics


@click.command()
@click.argument("prompt")
@click.option("--config", default="qwen3_omni", show_default=True, help="A pipeline's name or file.")
@click.option("--speaker", help="A speaker of the checkpoint; Qwen3-Omni has Ethan, Chelsie and Aiden.")
@click.option("--seed", type=int, help="The same seed gives the same speech.")
@click.option("--max-tokens", type=click.IntRange(min=1), help="Most tokens of the answer.")
def main(prompt: str, config: str, **params: Any) -> None:
    """Answer PROMPT in text and speech."""
    try:
        metrics = trio.run(speak, config, prompt, params)
    except OmniError as error:
        raise click.ClickException(str(error)) from error
    print(summary(metrics), stages(metrics))


async def speak(config: str, prompt: str, params: dict[str, Any]) -> RequestMetrics:
    """Print the answer, write its speech, and return its metrics. The pipeline decides parameters that are None."""
    async with OmniSystem.open(config) as omni:
        with SoundWriter("answer.wav") as file:
            async for out in omni.generate(prompt, modalities=("text", "audio"), **params):
                if isinstance(out.delta, AudioChunk):
                    await file.write(out.delta)
                elif out.delta is not None:
                    click.echo(out.delta, nl=False)
    click.echo()
    assert out.metrics is not None  # the last output has the metrics
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
