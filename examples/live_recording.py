"""Ask about a recording while another process captures it. The two share a ring, which they find by its name.

python examples/live_recording.py ask "What is being said?"
python examples/live_recording.py capture speech.wav
"""

from collections.abc import AsyncIterator
from functools import partial

import click
import numpy as np
import soundfile
import trio

from omni_actors import AudioChunk, OmniError, OmniSystem
from ringbuf import Ring, RingClosed, RingError, decode_bundle, encode_bundle  # in a wheel: omni_actors.ringbuf

BLOCK_S = 0.1
LOOK_S = 0.2
"""How long a wait for sound delays the end of a request that is cancelled."""


@click.group()
@click.option("--name", default="microphone", show_default=True, help="The label of the ring.")
@click.pass_context
def main(context: click.Context, name: str) -> None:
    """Capture sound in one process, and ask about it in another."""
    context.obj = name


@main.command()
@click.argument("file", type=click.Path(exists=True))
@click.pass_obj
def capture(name: str, file: str) -> None:
    """Send the sound of FILE, block by block, as a microphone would."""
    try:
        with Ring.open(name) as ring, soundfile.SoundFile(file) as sound:
            producer = ring.claim_producer()
            for block in sound.blocks(int(BLOCK_S * sound.samplerate), dtype="float32", always_2d=True):
                samples = np.ascontiguousarray(block.mean(axis=1))
                producer.send(*encode_bundle(sound.samplerate, {"samples": samples}))
    except (RingError, soundfile.SoundFileError) as error:
        raise click.ClickException(str(error)) from error


@main.command()
@click.argument("prompt")
@click.option("--config", default="qwen3_omni", show_default=True, help="A pipeline's name or file.")
@click.pass_obj
def ask(name: str, prompt: str, config: str) -> None:
    """Answer PROMPT about the recording, in text."""
    try:
        trio.run(answer, config, prompt, name)
    except (OmniError, RingError) as error:
        raise click.ClickException(str(error)) from error


async def answer(config: str, prompt: str, name: str) -> None:
    """Print the answer as it comes."""
    async with OmniSystem.open(config) as omni:
        with Ring.create_named(name) as ring:
            click.echo(f"ready: {name}")
            async for out in omni.generate(prompt, multi_modal_data={"audio": recorded(ring)}, modalities=("text",)):
                click.echo(out.delta or "", nl=False)
    click.echo()


async def recorded(ring: Ring) -> AsyncIterator[AudioChunk]:
    """Yield what arrives in the ring, until the capturing process closes it. Raises PeerDied if that process dies."""
    consumer = ring.claim_consumer()
    while True:
        try:
            frame = await trio.to_thread.run_sync(partial(consumer.recv, LOOK_S))
        except TimeoutError:
            continue
        except RingClosed:
            return
        with frame:
            bundle = decode_bundle(frame.data)
            chunk = AudioChunk(bundle.tensors["samples"].numpy().copy(), bundle.meta)
        yield chunk


if __name__ == "__main__":
    main()
