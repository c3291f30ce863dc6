"""/v1/audio: speech and transcription; and the sound of an AudioEncoder, sample by sample."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import numpy as np
import openai
import pytest
import soundfile
from hypothesis import given, settings
from hypothesis import strategies as st

from omni_actors.generation import AudioChunk
from omni_actors.serve.media.audio import AudioEncoder, complete_file


def test_speech_as_wav(client: openai.OpenAI) -> None:
    sound = client.audio.speech.create(model="studio", voice="any", input="one two three", response_format="wav")
    samples, rate = soundfile.read(io.BytesIO(sound.content), dtype="float32")
    assert rate == 16000
    assert samples == pytest.approx(np.full(4800, 0.5), abs=1e-4)


def test_speech_as_pcm_is_at_24_khz(client: openai.OpenAI) -> None:
    sound = client.audio.speech.create(model="studio", voice="any", input="one two", response_format="pcm").content
    samples = np.frombuffer(sound, "<i2") / 32767
    assert len(samples) == 4800
    assert samples[1000:-1000] == pytest.approx(np.full(2800, 0.5), abs=1e-3)


def test_transcription_in_every_format(client: openai.OpenAI, recording: Callable[..., bytes]) -> None:
    def ask(**arguments: Any) -> Any:
        file = ("a.flac", recording(2.0, 22050, "FLAC"))
        return client.audio.transcriptions.create(model="studio", file=file, **arguments)

    answer = ask()
    assert (answer.text, answer.usage.seconds) == ("2.0 s at 22050 Hz", 2)
    assert ask(response_format="text") == "2.0 s at 22050 Hz\n"
    *deltas, done = ask(stream=True)
    assert [delta.delta for delta in deltas] == ["2.0 s at 22050 Hz"]
    assert (done.type, done.text) == ("transcript.text.done", "2.0 s at 22050 Hz")


@settings(max_examples=50)
@given(
    sizes=st.lists(st.integers(0, 4000), min_size=1, max_size=8),
    rate=st.sampled_from([8000, 16000, 22050, 24000, 48000]),
    format=st.sampled_from(["wav", "pcm"]),
)
def test_an_encoder_keeps_the_sound_whole_however_it_is_cut(sizes: list[int], rate: int, format: str) -> None:
    ramp = np.linspace(-1.5, 1.5, sum(sizes), dtype=np.float32)
    encoder = AudioEncoder(format)
    pieces = [encoder.push(AudioChunk(part, rate)) for part in np.split(ramp, np.cumsum(sizes)[:-1])]
    data = complete_file([*pieces, encoder.finish()], format)
    if format == "wav":
        samples, found = soundfile.read(io.BytesIO(data), dtype="float32")
        assert found == rate
        assert samples == pytest.approx(np.clip(ramp, -1, 1), abs=1e-4)
    else:
        assert len(data) // 2 == pytest.approx(len(ramp) * 24000 / rate, abs=1)
