"""Make the media of the examples again: two spoken questions, a picture and a video with sound.

python examples/media/make.py     needs the extras `voice` and `omni`
"""

import tempfile
from pathlib import Path
from typing import Any

import av
import numpy as np
import soundfile
from PIL import Image, ImageDraw

from omni_actors.sync import Omni

HERE = Path(__file__).parent
VOICE = """\
extends: voice
stages:
  whisper: null
  llm: null
  acoustic: {inputs: []}
"""
"""The stages of "voice" that speak a text."""
SPOKEN = {"weather.ogg": "How will the weather be tomorrow?", "capital.ogg": "What is the capital of France?"}
SIZE, FPS, SECONDS = (160, 120), 8, 2
AAC_FRAME = 1024
"""Samples."""


def speak() -> None:
    """Write the spoken questions."""
    with tempfile.TemporaryDirectory() as folder:
        pipeline = Path(folder) / "speak.yaml"
        pipeline.write_text(VOICE)
        with Omni.open(pipeline) as omni:
            for name, text in SPOKEN.items():
                omni.generate(script=text, modalities=("audio",), seed=1).save(HERE / name)


def picture(sun: float) -> Image.Image:
    """Return a landscape. sun: how far the sun has come on its way, from 0 to 1."""
    image = Image.new("RGB", SIZE, "skyblue")
    draw = ImageDraw.Draw(image)
    x, y = SIZE[0] * (0.1 + 0.8 * sun), SIZE[1] * (0.6 - 1.6 * sun * (1 - sun))
    draw.ellipse((x - 12, y - 12, x + 12, y + 12), fill="gold")
    draw.rectangle((0, 85, *SIZE), fill="seagreen")
    draw.polygon([(20, 85), (60, 35), (100, 85)], fill="slategray")
    return image


def film(sound: Path, target: Path) -> None:
    """Write a video of the sun's way, with a recording as its sound."""
    samples, rate = soundfile.read(sound, dtype="float32")
    with av.open(str(target), "w") as container:
        frames: Any = container.add_stream("mpeg4", rate=FPS)
        frames.width, frames.height, frames.pix_fmt = *SIZE, "yuv420p"
        track: Any = container.add_stream("aac", rate=rate, layout="mono")
        for number in range(FPS * SECONDS):
            image = picture(number / (FPS * SECONDS - 1))
            container.mux(frames.encode(av.VideoFrame.from_image(image)))
        container.mux(frames.encode())
        for start in range(0, len(samples), AAC_FRAME):
            part = np.ascontiguousarray(samples[start : start + AAC_FRAME][None])
            block = av.AudioFrame.from_ndarray(part, format="fltp", layout="mono")
            block.sample_rate, block.pts = rate, start
            container.mux(track.encode(block))
        container.mux(track.encode())


if __name__ == "__main__":
    speak()
    picture(0.5).save(HERE / "landscape.png")
    film(HERE / "weather.ogg", HERE / "sunrise.mp4")
