"""Audio in and out: the routes /v1/audio, and each sample that an ``AudioEncoder`` encodes."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable
from typing import Any

import av
import numpy as np
import openai
import pytest
import soundfile
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from omni_actors.outputs import AudioChunk
from omni_actors.serve.access import admission
from omni_actors.serve.http.errors import HTTPError
from omni_actors.serve.media import audio, containers
from omni_actors.serve.media.audio import AudioEncoder, decode
from tests.serve.media.loading import ticket
from tests.support.http_server import WATCHDOG_S


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


@pytest.mark.parametrize(
    ("format", "media_type", "container"),
    [
        ("wav", "audio/wav", "WAV"),
        ("mp3", "audio/mpeg", "MP3"),
        ("flac", "audio/flac", "FLAC"),
        ("opus", "audio/ogg", "OGG"),
        (None, "audio/mpeg", "MP3"),
    ],
)
def test_speech_in_every_format_of_the_api(client: openai.OpenAI, format: Any, media_type: str, container: str) -> None:
    """The default is MP3, as in OpenAI's API. A stream may add half a frame of silence."""
    wanted = {} if format is None else {"response_format": format}
    response = client.audio.speech.create(model="studio", voice="any", input="la " * 20, **wanted)
    assert response.response.headers["content-type"] == media_type
    with soundfile.SoundFile(io.BytesIO(response.content)) as file:
        assert file.format == container
        assert 2.0 <= file.frames / file.samplerate < 2.2


@pytest.mark.parametrize("format", ["wav", "mp3", "flac", "opus"])
def test_a_spoken_chat_answer_in_every_format(client: openai.OpenAI, format: Any) -> None:
    answer = client.chat.completions.create(
        model="studio",
        messages=[{"role": "user", "content": "one two three"}],
        modalities=["text", "audio"],
        audio={"voice": "alloy", "format": format},
    )
    audio = answer.choices[0].message.audio
    assert audio is not None
    with soundfile.SoundFile(io.BytesIO(base64.b64decode(audio.data))) as file:
        assert file.format == {"opus": "OGG"}.get(format, format.upper())
        assert file.frames > 1600


def test_flac_cannot_be_streamed_in_chat(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="cannot be streamed") as caught:
        client.chat.completions.create(
            model="studio",
            messages=[{"role": "user", "content": "hello"}],
            modalities=["text", "audio"],
            audio={"voice": "alloy", "format": "flac"},
            stream=True,
        )
    assert caught.value.param == "audio.format"


@settings(max_examples=50)
@given(
    sizes=st.lists(st.integers(0, 4000), min_size=1, max_size=8),
    rate=st.sampled_from([8000, 16000, 22050, 24000, 48000]),
    format=st.sampled_from(["wav", "flac", "pcm"]),
    streamed=st.booleans(),
)
def test_an_encoder_keeps_every_sample_however_the_audio_is_cut(
    sizes: list[int], rate: int, format: Any, streamed: bool
) -> None:
    ramp = np.linspace(-1.5, 1.5, sum(sizes), dtype=np.float32)
    encoder = AudioEncoder(format, streamed=streamed and format != "flac")

    async def encode() -> bytes:
        chunks = [AudioChunk(part, rate) for part in np.split(ramp, np.cumsum(sizes)[:-1])]
        return b"".join([await encoder.push(chunk) for chunk in chunks]) + await encoder.finish()

    data = trio.run(encode)
    if format == "pcm":
        assert len(data) // 2 == pytest.approx(len(ramp) * 24000 / rate, abs=1)
    elif len(ramp):
        samples, found = soundfile.read(io.BytesIO(data), dtype="float32")
        assert found == rate
        assert samples == pytest.approx(np.clip(ramp, -1, 1), abs=1e-4)


async def test_a_streamed_wav_is_complete_without_a_known_length() -> None:
    encoder = AudioEncoder("wav", streamed=True)
    pieces = [await encoder.push(AudioChunk(np.full(100, 0.5, np.float32), 16000)) for _ in range(3)]
    data = b"".join([*pieces, await encoder.finish()])
    assert [len(piece) for piece in pieces] == [244, 200, 200]
    assert (data[:8], data[36:44]) == (b"RIFF\xff\xff\xff\xff", b"data\xff\xff\xff\xff")
    assert len(soundfile.read(io.BytesIO(data))[0]) == 300


def test_a_damaged_mp3_is_decoded_without_a_word_on_stderr(
    recording: Callable[..., bytes], capfd: pytest.CaptureFixture[str]
) -> None:
    """There the server has its log. Some of the damaged frames claim another sample rate, or two channels."""
    data = bytearray(recording(20.0, format="MP3"))
    for at, value in zip(range(2000, len(data), 150), range(256), strict=False):
        data[at] = value
    for damaged in (data, data[:3000]):
        seconds = outcome(bytes(damaged))
        assert isinstance(seconds, float)
        assert 0 < seconds < 21
    wrapped = io.BytesIO()
    with av.open(wrapped, "w", format="wav") as out:
        stream: Any = out.add_stream("libmp3lame", rate=16000, layout="mono")
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 16000), np.int16), format="s16", layout="mono")
        frame.sample_rate, frame.pts = 16000, 0
        out.mux(stream.encode(frame))
        out.mux(stream.encode(None))
    data = bytearray(wrapped.getvalue())
    data[-400:] = bytes(range(200)) * 2
    assert isinstance(outcome(bytes(data)), float)
    assert capfd.readouterr().err == ""


def ogg_pages(file: bytes) -> list[bytes]:
    pages, at = [], 0
    while at < len(file):
        end = at + 27 + file[at + 26] + sum(file[at + 27 : at + 27 + file[at + 26]])
        pages.append(file[at:end])
        at = end
    return pages


def test_what_a_file_lacks_is_not_filled_up_with_memory_of_earlier_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lost page of an Ogg file makes it shorter than its last page says."""
    used, empty = 7.5, np.empty

    def used_before(*given: Any, **more: Any) -> Any:
        memory = empty(*given, **more)
        memory.fill(used)
        return memory

    monkeypatch.setattr(np, "empty", used_before)
    noise = 0.1 * np.random.default_rng(1).standard_normal(48_000 * 5)
    file = io.BytesIO()
    soundfile.write(file, noise, 48_000, format="OGG", subtype="VORBIS")
    pages = ogg_pages(file.getvalue())
    found = audio._decode(b"".join(pages[:8] + pages[9:]), "file", 600.0, 28_800_000)
    assert isinstance(found, AudioChunk)
    assert 0 < len(found.samples) <= len(noise)
    assert np.abs(found.samples).max() < used


@pytest.mark.parametrize(
    ("format", "coding", "found"),
    [
        ("WAV", "GSM610", 1.0),
        ("W64", "GSM610", 1.0),
        ("AU", "G721_32", 1.0),
        ("WAV", "NMS_ADPCM_16", (400, "file")),
        ("XI", "DPCM_16", (400, "file")),
    ],
)
def test_a_coding_in_which_libsndfile_cannot_seek(format: str, coding: str, found: Any) -> None:
    """FFmpeg reads it, or it is refused."""
    tone = 0.3 * np.sin(2 * np.pi * 440 * np.arange(8000) / 8000)
    file = io.BytesIO()
    soundfile.write(file, tone, 8000, format=format, subtype=coding)
    with soundfile.SoundFile(io.BytesIO(file.getvalue())) as written:
        assert not written.seekable()
    assert outcome(file.getvalue()) == (pytest.approx(found, abs=0.05) if isinstance(found, float) else found)


@pytest.mark.parametrize("format", sorted({*soundfile.available_formats()} - {"SD2"}))  # it writes a second file
def test_libsndfile_opens_wav_flac_and_ogg_alone(format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its readers of other formats write to the server's log."""
    file, opened = io.BytesIO(), []
    coding = soundfile.default_subtype(format) or "PCM_16"
    soundfile.write(file, np.zeros(8000, np.float32), 8000, format=format, subtype=coding)
    open_file = soundfile.SoundFile
    monkeypatch.setattr(soundfile, "SoundFile", lambda data: opened.append(format) or open_file(data))
    found = audio._decode(file.getvalue(), "file", 600.0, 8000)
    is_its_own = format in ("WAV", "WAVEX", "RF64", "FLAC", "OGG")
    assert bool(opened) == is_its_own
    assert isinstance(found, AudioChunk) == is_its_own


def test_a_damaged_sds_is_refused_without_a_word_on_stdout(capfd: pytest.CaptureFixture[str]) -> None:
    file = io.BytesIO()
    soundfile.write(file, np.zeros(120, np.float32), 8000, format="SDS", subtype="PCM_16")
    data = bytearray(file.getvalue())
    data[21] = 0xFF  # the first packet begins with F0
    assert outcome(bytes(data)) == (400, "file")
    assert capfd.readouterr() == ("", "")


async def test_mp3_does_not_wait_behind_containers(
    recording: Callable[..., bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    busy = trio.CapacityLimiter(1)
    monkeypatch.setattr(audio, "CONTAINERS", busy)
    async with busy:
        with trio.fail_after(WATCHDOG_S):
            assert len(await decoded([(recording(1.0, format="MP3"), "file")])) == 1


@pytest.mark.parametrize(("first", "second"), [("WAV", "WAV"), ("MP3", "FLAC"), ("FLAC", "MP3")])
def test_recordings_of_a_request_share_its_limit(
    recording: Callable[..., bytes], monkeypatch: pytest.MonkeyPatch, first: str, second: str
) -> None:
    """At any rate: the limit counts seconds."""
    for module in (audio, containers):
        monkeypatch.setattr(module, "MAX_AUDIO_S", 3)
    files = [(recording(2.0, 8000, first), "first"), (recording(2.0, 8000, second), "second")]
    with pytest.raises(HTTPError) as caught:
        trio.run(decoded, files)
    assert (caught.value.param, caught.value.code) == ("second", "audio_too_long")
    assert "may have 3 s" in caught.value.message
    assert len(trio.run(decoded, files[:1])) == 1


@pytest.mark.parametrize("format", ["FLAC", "MP3"])
async def test_the_ticket_counts_decoded_audio(
    recording: Callable[..., bytes], monkeypatch: pytest.MonkeyPatch, format: str
) -> None:
    files = [(recording(1.0, format=format), "first"), (recording(1.0, format=format), "second")]
    into = ticket()
    clips = await decode(files, into)
    assert into.audio_bytes == sum(4 * len(clip.samples) for clip in clips) >= 4 * 2 * 16_000
    monkeypatch.setattr(admission, "MAX_AUDIO_BYTES", into.audio_bytes - 1)
    with pytest.raises(HTTPError, match="decoded audio") as caught:
        await decode(files, ticket())
    assert (caught.value.status, caught.value.code) == (429, "overloaded")


@pytest.mark.slow
@pytest.mark.parametrize(("container", "codec"), [("mp4", "aac"), ("webm", "libopus"), ("avi", "libmp3lame")])
def test_a_damaged_container_is_decoded_or_refused(container: str, codec: str) -> None:
    file = io.BytesIO()
    with av.open(file, "w", format=container) as out:
        stream: Any = out.add_stream(codec, rate=48000, layout="mono")
        tone = av.AudioFrame.from_ndarray(np.zeros((1, 24000), np.int16), format="s16", layout="mono")
        tone.sample_rate, tone.pts = 48000, 0
        out.mux(stream.encode(tone))
        out.mux(stream.encode(None))
    whole = file.getvalue()

    @settings(max_examples=25)
    @given(
        st.integers(0, len(whole)), st.lists(st.tuples(st.integers(0, len(whole) - 1), st.integers(0, 255)), max_size=8)
    )
    def answered(size: int, changes: list[tuple[int, int]]) -> None:
        data = bytearray(whole)
        for at, value in changes:
            data[at] = value
        found = outcome(bytes(data[:size]))
        assert found == (400, "file") or (isinstance(found, float) and 0 < found <= 600)

    answered()


async def decoded(files: list[tuple[bytes, str]]) -> list[AudioChunk]:
    return await decode(files, ticket())


def outcome(data: bytes) -> float | tuple[int, str | None]:
    """Return the seconds of a file, or the status and the parameter of its refusal."""
    try:
        [clip] = trio.run(decoded, [(data, "file")])
    except HTTPError as error:
        return error.status, error.param
    return clip.duration_s
