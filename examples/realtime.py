"""Ask a spoken question over the realtime API, and hear the answer while it is made. OpenAI's own client, unchanged.

omni-actors serve voice
python examples/realtime.py question.wav answer.wav
"""

import asyncio
import base64

import click
import numpy as np
import openai
import soundfile
import soxr
import websockets

RATE = 24000
BLOCK_S = 0.1


@click.command()
@click.argument("question", type=click.Path(exists=True))
@click.argument("answer", type=click.Path())
@click.option("--url", default="http://127.0.0.1:8091/v1", show_default=True)
@click.option("--key", default="none", help="The server's API key.")
@click.option("--model", default="voice", show_default=True)
def main(question: str, answer: str, url: str, key: str, model: str) -> None:
    """Send the sound file QUESTION, and write the spoken ANSWER to a sound file."""
    try:
        asyncio.run(talk(question, answer, url, key, model))
    except (OSError, soundfile.SoundFileError, websockets.WebSocketException) as error:
        raise click.ClickException(str(error)) from error


async def talk(question: str, answer: str, url: str, key: str, model: str) -> None:
    async with (
        openai.AsyncOpenAI(base_url=url, api_key=key) as client,
        client.realtime.connect(model=model) as connection,
    ):
        audio = {"input": {"transcription": {"model": "whisper-1"}, "turn_detection": None}}
        await connection.session.update(session={"type": "realtime", "audio": audio})
        for block in blocks(question):
            await connection.input_audio_buffer.append(audio=base64.b64encode(block).decode())
        await connection.input_audio_buffer.commit()
        await connection.response.create()
        with soundfile.SoundFile(answer, "w", RATE, 1) as file:
            async for event in connection:
                match event.type:
                    case "conversation.item.input_audio_transcription.completed":
                        click.echo(f"you: {event.transcript}")
                    case "response.output_audio.delta":
                        file.write(np.frombuffer(base64.b64decode(event.delta), "<i2"))
                    case "response.output_audio_transcript.delta":
                        click.echo(event.delta, nl=False)
                    case "error":
                        raise click.ClickException(event.error.message)
                    case "response.done":
                        click.echo(f"\n{event.response.status}")
                        return
            raise click.ClickException("the server has closed the connection")


def blocks(path: str) -> list[bytes]:
    """Return the sound of a file as 16 bits, mono, 24 kHz, in blocks as a microphone gives them."""
    samples, rate = soundfile.read(path, dtype="float32", always_2d=True)
    mono = soxr.resample(samples.mean(axis=1), rate, RATE)
    data = (mono.clip(-1, 1) * 32767).astype("<i2").tobytes()
    size = 2 * int(RATE * BLOCK_S)
    return [data[at : at + size] for at in range(0, len(data), size)]


if __name__ == "__main__":
    main()
