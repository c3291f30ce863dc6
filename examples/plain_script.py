"""Answer questions in a plain script, which knows no event loop. The speech goes to 1.wav, 2.wav, …

python examples/plain_script.py "Why is the sky blue?" "Who wrote Faust?"
"""

import click
import soundfile

from omni_actors import OmniError
from omni_actors.sync import Omni


@click.command()
@click.argument("questions", nargs=-1, required=True)
@click.option("--config", default="voice", show_default=True, help="A pipeline or a model.")
@click.option("--max-tokens", type=click.IntRange(min=1), help="Most tokens of an answer.")
def main(questions: tuple[str, ...], config: str, max_tokens: int | None) -> None:
    """Answer the QUESTIONS in text and speech, all at once."""
    try:
        with Omni.open(config) as omni:
            answers = omni.answer_all(questions, modalities=("text", "audio"), max_tokens=max_tokens)
    except OmniError as error:
        raise click.ClickException(str(error)) from error
    for number, (question, answer) in enumerate(zip(questions, answers, strict=True), 1):
        click.echo(f"{question}\n  {answer.text}")
        if answer.audio is not None:
            soundfile.write(f"{number}.wav", answer.audio.samples, answer.audio.sample_rate)


main()
