"""Answer a file of prompts, one a line, many at once: line 7's text and speech go to 0007.txt and 0007.wav.

python examples/offline_batch.py prompts.txt answers --at-once 32
"""

from pathlib import Path
from typing import Any, TextIO

import click
import numpy as np
import soundfile
import trio
from rich import print
from rich.table import Table

from omni_actors import AudioChunk, OmniError, OmniSystem


@click.command()
@click.argument("prompts", type=click.File(encoding="utf-8"))
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
@click.option("--config", default="qwen3_omni", show_default=True, help="A pipeline's name or file.")
@click.option("--at-once", type=click.IntRange(min=1), default=16, show_default=True, help="Prompts under way.")
@click.option("--max-tokens", type=click.IntRange(min=1), help="Longest answer, in tokens of text.")
def main(prompts: TextIO, folder: Path, config: str, at_once: int, **params: Any) -> None:
    """Answer each line of PROMPTS into FOLDER."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        failed = trio.run(answer_all, config, prompts, folder, at_once, params)
    except OmniError as error:
        raise click.ClickException(str(error)) from error
    raise SystemExit(1 if failed else 0)


async def answer_all(config: str, prompts: TextIO, folder: Path, at_once: int, params: dict[str, Any]) -> list[int]:
    """The lines that failed: each is reported, leaves no file, and the others go on."""
    lines = enumerate(prompts, 1)  # shared by all that work: whoever is done takes the next
    answered: list[tuple[int, float]] = []
    failed: list[int] = []

    async def work() -> None:
        for number, line in lines:
            if prompt := line.strip():
                try:
                    answered.append(await answer(omni, prompt, folder / f"{number:04}", params))
                except OmniError as error:
                    click.echo(f"line {number}: {error}", err=True)
                    failed.append(number)

    admits: dict[str, Any] = {"limits.max_requests": at_once}
    async with OmniSystem.open(config, **admits) as omni:
        began = trio.current_time()
        async with trio.open_nursery() as nursery:
            for _ in range(at_once):
                nursery.start_soon(work)
        took_s = trio.current_time() - began

    table = Table("answered", "failed", "time", "requests/s", "tokens/s", "audio s/s")
    amounts = len(answered), sum(tokens for tokens, _ in answered), sum(audio_s for _, audio_s in answered)
    rates = (f"{amount / took_s:.2f}" for amount in amounts)
    table.add_row(str(len(answered)), str(len(failed)), f"{took_s:.1f} s", *rates)
    print(table)
    return failed


async def answer(omni: OmniSystem, prompt: str, stem: Path, params: dict[str, Any]) -> tuple[int, float]:
    """Tokens of the text, and seconds of the speech."""
    text, sound, tokens = "", [], 0
    async for out in omni.generate(prompt, modalities=("text", "audio"), **params):
        if isinstance(out.delta, AudioChunk):
            sound.append(out.delta)
        elif out.delta is not None:
            text += out.delta
        tokens += out.data.get("completion_tokens", 0)  # comes with the end of the text
    stem.with_suffix(".txt").write_text(text, encoding="utf-8")
    if sound:
        samples = np.concatenate([chunk.samples for chunk in sound])
        soundfile.write(stem.with_suffix(".wav"), samples, sound[0].sample_rate)
    return tokens, sum(chunk.duration_s for chunk in sound)


main()
