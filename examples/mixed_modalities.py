"""Ask about recordings, images and videos. The answer is printed, and its speech is written to answer.wav.

python examples/mixed_modalities.py --image cherries.jpg --audio cough.wav --video dance.mp4 --use-audio-in-video
"""

from pathlib import Path
from typing import Any

import click
import soundfile
import trio

from omni_actors import AudioChunk, OmniError, OmniSystem
from omni_actors.output_files import SoundWriter

FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.command()
@click.option("--config", default="qwen2_5_omni", show_default=True, help="A pipeline's name or file.")
@click.option("--audio", type=FILE, multiple=True, help="A recording. This and the next two options may be repeated.")
@click.option("--image", type=FILE, multiple=True, help="An image.")
@click.option("--video", type=FILE, multiple=True, help="A video.")
@click.option("--prompt", default="What do you hear and see?", show_default=True, help="Asked after all of them.")
@click.option("--use-audio-in-video", is_flag=True, help="Use the sound of the videos too.")
@click.option("--seed", type=int, help="The same seed gives the same speech.")
@click.option("--max-tokens", type=click.IntRange(min=1), help="Most tokens of the answer.")
def main(
    config: str,
    audio: tuple[Path, ...],
    image: tuple[Path, ...],
    video: tuple[Path, ...],
    prompt: str,
    **params: Any,
) -> None:
    """Ask PROMPT about recordings, images and videos."""
    # Images and videos are passed as files: the worker of the thinker decodes them.
    media = {"audio": [read_audio(path) for path in audio], "image": image, "video": video}
    if not params["use_audio_in_video"]:
        del params["use_audio_in_video"]  # a parameter of the omni models: "voice", for one, does not know it
    try:
        trio.run(answer, config, prompt, media, params)
    except OmniError as error:
        raise click.ClickException(str(error)) from error


def read_audio(path: Path) -> AudioChunk:
    try:
        samples, rate = soundfile.read(path, dtype="float32", always_2d=True)
    except soundfile.SoundFileError as error:
        raise click.ClickException(str(error)) from error
    return AudioChunk(samples.mean(axis=1), rate)


async def answer(config: str, prompt: str, media: dict[str, Any], params: dict[str, Any]) -> None:
    async with OmniSystem.open(config) as omni:
        with SoundWriter("answer.wav") as file:
            async for out in omni.generate(prompt, multi_modal_data=media, modalities=("text", "audio"), **params):
                if isinstance(out.delta, AudioChunk):
                    await file.write(out.delta)
                elif out.delta is not None:
                    click.echo(out.delta, nl=False)
    click.echo()


main()
