"""Answer a file of prompts, one per line, many at once. The answer to line 7 is in 0007.txt and 0007.wav.

python examples/offline_batch.py prompts.txt answers --at-once 32
"""

from pathlib import Path
from typing import Any, TextIO

import click
import soundfile
import trio
from rich import print
from rich.table import Table

from omni_actors import Answer, OmniError, OmniSystem


@click.command()
@click.argument("prompts", type=click.File(encoding="utf-8"))
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
@click.option("--config", default="qwen3_omni", show_default=True, help="A pipeline's name or file.")
@click.option("--at-once", type=click.IntRange(min=1), default=16, show_default=True, help="Prompts that run together.")
@click.option("--max-tokens", type=click.IntRange(min=1), help="Most tokens of an answer.")
def main(prompts: TextIO, folder: Path, config: str, at_once: int, **params: Any) -> None:
    """Answer each line of PROMPTS into FOLDER."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        failed = trio.run(answer_all, config, prompts, folder, at_once, params)
    except (OmniError, UnicodeDecodeError) as error:
        raise click.ClickException(str(error)) from error
    raise SystemExit(1 if failed else 0)


async def answer_all(config: str, prompts: TextIO, folder: Path, at_once: int, params: dict[str, Any]) -> list[int]:
    """Write the answers, and return the numbers of the lines that failed: each is reported, and the others go on."""
    lines = [(number, line.strip()) for number, line in enumerate(prompts, 1) if line.strip()]
    answered: list[tuple[int, float]] = []  # tokens of the text, and seconds of the speech
    failed: list[int] = []
    questions = [line for _, line in lines]
    async with OmniSystem.open(config, overrides={"limits.max_requests": at_once}) as omni:
        began = trio.current_time()
        arguments = {"modalities": ("text", "audio"), **params}
        async with omni.map(questions, concurrency=at_once, keep_errors=True, **arguments) as answers:
            async for answer in answers:
                number = lines[answer.index][0]
                if answer.error is None:
                    answered.append(write(answer, folder / f"{number:04}"))
                else:
                    click.echo(f"line {number}: {answer.error}", err=True)
                    failed.append(number)
        took_s = trio.current_time() - began

    table = Table("answered", "failed", "time", "requests/s", "tokens/s", "audio s/s")
    amounts = len(answered), sum(tokens for tokens, _ in answered), sum(audio_s for _, audio_s in answered)
    rates = (f"{amount / took_s:.2f}" for amount in amounts)
    table.add_row(str(len(answered)), str(len(failed)), f"{took_s:.1f} s", *rates)
    print(table)
    return failed


def write(answer: Answer, stem: Path) -> tuple[int, float]:
    """Write an answer's files, and return its tokens and its seconds of speech."""
    stem.with_suffix(".txt").write_text(answer.text, encoding="utf-8")
    if answer.audio is not None:
        soundfile.write(stem.with_suffix(".wav"), answer.audio.samples, answer.audio.sample_rate)
    return answer.data["text"].get("completion_tokens", 0), answer.audio.duration_s if answer.audio else 0.0


main()
