"""The routes for transcripts, as OpenAI's own client uses them, on an engine without a model and on whisper."""

from __future__ import annotations

import io
import struct
from collections.abc import Callable
from typing import Any

import av
import httpx
import numpy as np
import openai
import pytest
from openai.types.audio import TranscriptionTextDeltaEvent, TranscriptionTextDoneEvent, TranscriptionVerbose

from tests.support.http_server import Server

RESULT = "2.0 s at 16000 Hz"


@pytest.fixture
def file(recording: Callable[..., bytes]) -> tuple[str, bytes]:
    return "a.wav", recording(2.0)


def ask(client: openai.OpenAI, file: Any, **arguments: Any) -> Any:
    return client.audio.transcriptions.create(model="studio", file=file, **arguments)


def valid(schema: Any, found: Any) -> Any:
    """Return what the client made of an object, after its own types have checked it."""
    return schema.model_validate(found.model_dump(), strict=True)


def test_the_verbose_object_has_segments_or_words_or_both(client: openai.OpenAI, file: Any) -> None:
    found = valid(TranscriptionVerbose, ask(client, file, response_format="verbose_json", language="en"))
    assert (found.text, found.language, found.duration) == (RESULT, "en", 2.0)
    assert [(each.text, each.start, each.end) for each in found.segments] == [(RESULT, 0.0, 2.0)]
    assert found.words is None
    both = ask(client, file, response_format="verbose_json", timestamp_granularities=["word", "word", "segment"])
    [segment], [word] = valid(TranscriptionVerbose, both).segments, both.words
    assert (segment.end, word.word, word.start, word.end) == (2.0, "all", 0.0, 2.0)
    words = ask(client, file, response_format="verbose_json", timestamp_granularities=["word"])
    assert (words.segments, len(words.words)) == (None, 1)


def test_subtitles(client: openai.OpenAI, file: Any) -> None:
    assert ask(client, file, response_format="srt") == f"1\n00:00:00,000 --> 00:00:02,000\n{RESULT}\n\n"
    vtt = ask(client, file, response_format="vtt", prompt="<b> & so on")
    assert vtt == f"WEBVTT\n\n00:00:00.000 --> 00:00:02.000\n{RESULT}, &lt;b&gt; &amp; so on\n\n"
    srt = ask(client, file, response_format="srt", prompt="a --> b ---> c")
    assert srt.endswith(f"\n{RESULT}, a -> b -> c\n\n"), "an arrow would be taken for times"


def test_a_stream_has_openais_events(client: openai.OpenAI, file: Any) -> None:
    *deltas, done = ask(client, file, stream=True)
    assert [valid(TranscriptionTextDeltaEvent, delta).delta for delta in deltas] == [RESULT]
    assert valid(TranscriptionTextDoneEvent, done).text == RESULT


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # the client deprecates translations
def test_a_translation_in_every_format(client: openai.OpenAI, file: Any) -> None:
    def translate(**arguments: Any) -> Any:
        return client.audio.translations.create(model="studio", file=file, **arguments)

    assert translate().text == f"{RESULT}, translate"
    assert translate(prompt="Dear", response_format="text") == f"{RESULT}, translate, Dear\n"
    verbose = translate(response_format="verbose_json")
    assert (verbose.text, verbose.language, verbose.duration) == (f"{RESULT}, translate", "en", 2.0)
    assert translate(response_format="srt").startswith("1\n00:00:00,000 --> ")
    assert translate(response_format="vtt").startswith("WEBVTT")


def test_a_language_that_the_engine_refuses(client: openai.OpenAI, file: Any) -> None:
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as caught:
            ask(client, file, language="xx", stream=stream)
        assert caught.value.param == "language"


# containers


def container(format: str, codec: str, seconds: float = 1.0, video: bool = False) -> bytes:
    file = io.BytesIO()
    with av.open(file, "w", format=format) as out:
        stream: Any = out.add_stream(codec, rate=48000, layout="stereo")
        picture: Any = out.add_stream("mpeg4", rate=10) if video else None
        if picture is not None:
            picture.width = picture.height = 32
            picture.pix_fmt = "yuv420p"
            out.mux(picture.encode(av.VideoFrame(32, 32, "yuv420p")))
        samples = (np.sin(np.arange(2 * round(48000 * seconds)) / 30) * 9000).astype(np.int16)
        frame = av.AudioFrame.from_ndarray(samples[None], format="s16", layout="stereo")
        frame.sample_rate, frame.pts = 48000, 0
        out.mux(stream.encode(frame))
        out.mux(stream.encode(None))
        if picture is not None:
            out.mux(picture.encode(None))
    return file.getvalue()


@pytest.mark.parametrize(
    ("format", "codec", "video"),
    [
        ("mp4", "aac", True),
        ("webm", "libopus", False),
        ("adts", "aac", False),
        ("matroska", "flac", False),
        pytest.param("mov", "aac", False, marks=pytest.mark.slow),
        pytest.param("avi", "libmp3lame", True, marks=pytest.mark.slow),
        pytest.param("mpegts", "mp2", False, marks=pytest.mark.slow),
    ],
)
def test_the_sound_of_any_container_is_decoded(client: openai.OpenAI, format: str, codec: str, video: bool) -> None:
    data = container(format, codec, video=video)
    assert ask(client, (f"a.{format}", data)).text in ("1.0 s at 48000 Hz", "1.1 s at 48000 Hz")


def endless_mp4() -> bytes:
    """A file of a few kB that claims a thousand million samples."""
    data = bytearray(container("mov", "pcm_s16le"))
    at = data.index(b"stsz")
    struct.pack_into(">II", data, at + 8, 4, 1 << 30)
    at = data.index(b"stts")
    struct.pack_into(">II", data, at + 12, 1 << 30, 1)
    at = data.index(b"stsc")
    struct.pack_into(">I", data, at + 16, 1 << 30)
    return bytes(data)


PLAYLIST = b"#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\n%s\n#EXT-X-ENDLIST\n"


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (container("mp4", "aac")[:2000], "invalid_audio"),
        (container("webm", "libopus")[:60], "invalid_audio"),
        (PLAYLIST % b"file:///proc/self/environ", "invalid_audio"),
        (PLAYLIST % b"http://127.0.0.1:9/a.wav", "invalid_audio"),
        (b"ffconcat version 1.0\nfile /dev/zero\n", "invalid_audio"),
        (b"\x89PNG\r\n\x1a\n" + bytes(100), "invalid_audio"),
        (b"<html>", "invalid_audio"),
        (bytes(100_000), "invalid_audio"),
    ],
    ids=["mp4 without its index", "webm head", "file playlist", "web playlist", "concat", "png", "html", "zeros"],
)
def test_a_file_that_is_no_sound_is_refused(studio: Server, data: bytes, code: str) -> None:
    assert refusal(studio, data)["code"] == code


def test_a_container_that_claims_more_than_it_has_costs_its_own_request_only(studio: Server) -> None:
    """FFmpeg reads what is there, or refuses the file."""
    files = {"file": ("a.mov", endless_mp4())}
    answer = studio.http.post("/v1/audio/transcriptions", data={"model": "studio"}, files=files)
    assert answer.status_code in (200, 400)
    assert studio.status() == "ready"


@pytest.mark.slow
def test_hours_of_silence_in_a_small_container_are_refused(studio: Server) -> None:
    file = io.BytesIO()
    with av.open(file, "w", format="matroska") as out:
        stream: Any = out.add_stream("flac", rate=8000, layout="mono")
        silence = av.AudioFrame.from_ndarray(np.zeros((1, 8000 * 700), np.int16), format="s16", layout="mono")
        silence.sample_rate, silence.pts = 8000, 0
        out.mux(stream.encode(silence))
        out.mux(stream.encode(None))
    assert len(file.getvalue()) < 200_000
    assert refusal(studio, file.getvalue())["code"] == "audio_too_long"


def refusal(server: Server, data: bytes) -> dict[str, Any]:
    answer: httpx.Response = server.http.post(
        "/v1/audio/transcriptions", data={"model": "studio"}, files={"file": ("a.mp4", data)}
    )
    assert answer.status_code == 400, answer.text
    error: dict[str, Any] = answer.json()["error"]
    assert error["param"] == "file"
    return error
