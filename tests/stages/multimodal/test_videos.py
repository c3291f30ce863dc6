from __future__ import annotations

import io
import math
import random
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import torch

from omni_actors.stages.base import InvalidRequest
from omni_actors.stages.multimodal import videos
from omni_actors.stages.multimodal.frames import resize
from omni_actors.stages.multimodal.limits import Deadline, MediaLimits
from omni_actors.stages.multimodal.videos import Frames, Size, decode_sound, decode_video, sample_frames
from tests.support.media_inputs import RATE, noise, video_file

pytestmark = pytest.mark.voice  # the extra's libraries

LIMITS = MediaLimits()


def fit(height: int, width: int) -> Size:
    return Size(height, width, 1000)


def numbers(frames: Frames) -> list[int]:
    """Return the numbers of the frames in ``video_file``, from their brightness."""
    return [round(float(mean) / 4) for mean in frames.pixels.float().mean((1, 2, 3))]


def refused(data: bytes, **limits: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as refusal:
        decode_video(data, 0, given := MediaLimits(**limits), fit, Deadline(given.decode_s))
    assert refusal.value.param == "video"
    return refusal.value


@pytest.mark.parametrize(
    ("format", "codec"),
    [
        ("mp4", "libx264"),
        ("matroska", "libx264"),
        ("webm", "libvpx-vp9"),
        ("avi", "mpeg4"),
        ("mpegts", "libx264"),
        ("gif", "gif"),
    ],
)
def test_files_are_sampled_at_the_models_rate(format: str, codec: str) -> None:
    frames = decode_video(video_file(60, fps=30, format=format, codec=codec), 0, LIMITS, fit, Deadline(60))
    assert numbers(frames) == [0, 15, 30, 45]
    assert frames.fps == 2.0
    assert frames.pixels.shape == (4, 48, 64, 3)
    assert frames.pixels.dtype == torch.uint8


@pytest.mark.parametrize(
    ("count", "fps", "kept", "rate"),
    [
        (61, 30, [0, 15, 30, 45, 60], 2.0),
        (3, 1, [0, 1, 2], 1.0),  # it has only three
        (20, 30, [0, 5, 10, 15], 6.0),  # too short for the usual rate
        (2, 30, [0, 1], 30.0),
        (1, 30, [0], 30.0),
    ],
)
def test_frames_and_files_are_sampled_alike(count: int, fps: int, kept: list[int], rate: float) -> None:
    file = decode_video(video_file(count, fps=fps), 0, LIMITS, fit, Deadline(60))
    content = np.arange(count, dtype=np.uint8)[:, None, None, None].repeat(3, 3) * 4
    given = sample_frames(content, fps, 0, LIMITS, fit, Deadline(60))
    assert numbers(file) == numbers(given) == kept
    assert file.fps == pytest.approx(rate, rel=0.01)
    assert given.fps == pytest.approx(rate)


def test_a_video_with_uneven_frame_times_is_sampled_by_time() -> None:
    file = video_file(times=[0, 100, 200, 900, 1000, 1700, 3000, 3100])
    assert numbers(decode_video(file, 0, LIMITS, fit, Deadline(60))) == [0, 2, 4, 4, 5, 5, 6]


def test_frames_are_shrunk_to_the_size_that_fits_the_first() -> None:
    sizes = []

    def shrink(height: int, width: int) -> Size:
        sizes.append((height, width))
        return Size(28, 56, 1000)

    frames = decode_video(video_file(), 0, LIMITS, shrink, Deadline(60))
    assert frames.pixels.shape == (4, 28, 56, 3)
    assert sizes == [(48, 64)]


@pytest.mark.parametrize(
    ("matrix", "turns"),
    [((0, 1, -1, 0), 3), ((-1, 0, 0, -1), 2), ((0, -1, 1, 0), 1)],
)
def test_a_video_is_rotated_by_its_display_matrix(matrix: tuple[int, ...], turns: int) -> None:
    pixels = np.zeros((48, 64, 3), np.uint8)
    pixels[:24, :32] = 240
    file = bytearray(video_file(4, fps=2, format="mp4", codec="libx264", pixels=pixels))
    place = file.index(b"tkhd") + 4 + 40  # the track's matrix: a, b, u, c, d, v, …, 16.16
    a, b, c, d = (int(value * 65536).to_bytes(4, "big", signed=True) for value in matrix)
    file[place : place + 20] = a + b + bytes(4) + c + d
    frames = decode_video(bytes(file), 0, LIMITS, fit, Deadline(60))
    expected = np.rot90(pixels, turns).astype(int)
    assert frames.pixels[0].shape == expected.shape
    assert np.abs(frames.pixels[0].numpy() - expected).mean() < 8


def test_the_sound_of_a_file_is_mono() -> None:
    tone = np.sin(np.arange(RATE) / 9, dtype=np.float32) * 0.5
    recording = decode_sound(video_file(audio=np.stack([tone, np.zeros_like(tone)])), 0, 10.0, Deadline(60))
    assert recording is not None
    assert np.abs(recording.resampled(RATE) - tone / 2).max() < 1e-3


@pytest.mark.parametrize("file", [video_file(), video_file(audio=np.zeros((1, 90), np.float32))])
def test_a_silent_file_has_no_sound(file: bytes) -> None:
    assert decode_sound(file, 0, 10.0, Deadline(60)) is None


def test_frames_beyond_the_prompts_tokens_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="more than 3 frames of its size") as refusal:
        decode_video(video_file(), 0, LIMITS, lambda height, width: Size(height, width, 3), Deadline(60))
    assert refusal.value.code == "context_length_exceeded"


def test_the_sound_of_a_file_has_a_limit() -> None:
    file = video_file(audio=np.zeros((1, RATE), np.float32))
    with pytest.raises(InvalidRequest, match=r"the limit is 0\.5 s"):
        decode_sound(file, 0, 0.5, Deadline(60))


@pytest.mark.parametrize("channels", [1, 2])
@pytest.mark.parametrize("wild", [math.nan, math.inf, -math.inf, 1e30])
def test_sound_that_no_feature_extractor_bears_is_refused(wild: float, channels: int) -> None:
    audio = np.zeros((channels, RATE), np.float32)
    audio[-1, 100] = wild
    file = video_file(audio=audio, audio_codec="pcm_f32le")
    with pytest.raises(InvalidRequest, match="video 2: some samples of its sound are not finite") as refusal:
        decode_sound(file, 2, 10.0, Deadline(60))
    assert (refusal.value.param, refusal.value.code) == ("video", "invalid_video")


def test_a_still_frame_is_resized_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first frame of the file is sampled twice, and the second one a hundred times."""
    resized = []

    def noting(pixels: torch.Tensor, height: int, width: int) -> torch.Tensor:
        resized.append(pixels)
        return resize(pixels, height, width)

    monkeypatch.setattr(videos, "resize", noting)
    file = video_file(times=[0, 1000, 51_000])
    assert numbers(decode_video(file, 0, LIMITS, fit, Deadline(60))) == [0] * 2 + [1] * 100 + [2]
    assert len(resized) == 3


def test_a_still_frame_does_not_evade_the_deadline() -> None:
    """The time ends after the frame was decoded, while it is kept again and again."""
    is_over = False

    class Ending(Deadline):
        def check(self, kind: str, index: int) -> None:
            if is_over:
                raise InvalidRequest("the time is over", param=kind)

    def slow(height: int, width: int) -> Size:
        nonlocal is_over
        is_over = True
        return Size(height, width, 3)  # with a fourth frame, the refusal is another one

    with pytest.raises(InvalidRequest, match="the time is over"):
        decode_video(video_file(times=[0, 50_000]), 0, LIMITS, slow, Ending(60))


def with_invisible_frames(file: bytes, count: int) -> bytes:
    """Return the first frame of a file of VP8, and then one that only changes the decoder's state, ``count`` times."""
    remade = io.BytesIO()
    with av.open(io.BytesIO(file)) as source, av.open(remade, "w", format="matroska") as target:
        first, second, *_ = (packet for packet in source.demux(video=0) if packet.size)
        stream = target.add_stream_from_template(first.stream)
        hidden = bytearray(bytes(second))
        hidden[0] &= ~0x10  # the bit show_frame
        for number, data in enumerate([bytes(first)] + [bytes(hidden)] * count):
            packet = av.Packet(data)
            packet.stream, packet.time_base = stream, Fraction(1, 1000)
            packet.pts = packet.dts = number
            packet.is_keyframe = number == 0
            target.mux(packet)
    return remade.getvalue()


def test_packets_that_give_no_frame_do_not_evade_the_deadline() -> None:
    file = with_invisible_frames(video_file(codec="libvpx"), 100)
    assert len(decode_video(file, 0, LIMITS, fit, Deadline(60)).pixels) == 1
    checks = 0

    class Counting(Deadline):
        def check(self, kind: str, index: int) -> None:
            nonlocal checks
            checks += 1

    decode_video(file, 0, LIMITS, fit, Counting(60))
    assert checks > 100


def test_a_file_that_demands_more_memory_than_ffmpeg_allocates_is_refused() -> None:
    file = bytearray(video_file(8, format="mp4", codec="mpeg4"))
    begin = file.index(b"stts") + 8  # the table of the frames' times: its number of entries
    file[begin : begin + 4] = (1 << 28).to_bytes(4, "big")
    assert refused(bytes(file)).code == "invalid_video"
    with pytest.raises(InvalidRequest):
        decode_sound(bytes(file), 0, 10.0, Deadline(60))


def lossless_sound(rate: int, *, samples: int = 1 << 16) -> bytes:
    """Return a video with silence of this rate, which FFmpeg reads in the decoder's settings and not in the header."""
    file = bytearray(
        video_file(4, format="mp4", codec="mpeg4", audio=np.zeros((1, samples), np.float32), audio_codec="alac")
    )
    at, places = 0, 0
    while (at := file.find(b"\0\0\0\x24alac", at) + 4) > 3:
        file[at + 28 : at + 32] = rate.to_bytes(4, "big")
        places += 1
    assert places == 1
    return bytes(file)


@pytest.mark.parametrize("rate", [999, 384_001, 2_000_000_000])
def test_sound_of_an_unusual_rate_is_refused(rate: int) -> None:
    """The limit in seconds would allow any number of samples."""
    with pytest.raises(InvalidRequest, match=f"video 3: its sound: a sample rate of 1000 to .*, not {rate}") as refusal:
        decode_sound(lossless_sound(rate), 3, 600.0, Deadline(60))
    assert (refusal.value.param, refusal.value.code) == ("video", "invalid_video")


def test_sound_of_a_high_rate_has_no_more_samples_than_of_a_usual_one() -> None:
    file = lossless_sound(384_000)
    assert decode_sound(file, 0, (1 << 16) / 48_000, Deadline(60)) is not None
    with pytest.raises(InvalidRequest, match="its sound is too long") as refusal:
        decode_sound(file, 0, 60_000 / 48_000, Deadline(60))
    assert refusal.value.code == "video_too_long"


def test_sound_has_the_deadline_of_the_request() -> None:
    file = video_file(audio=np.zeros((1, RATE), np.float32))
    with pytest.raises(InvalidRequest, match="takes more than 1e-09 s") as refusal:
        decode_sound(file, 0, 10.0, Deadline(1e-9))
    assert refusal.value.code == "video_too_slow"


@pytest.mark.parametrize(
    ("limits", "code", "reason"),
    [
        ({"video_pixels": 48 * 64 - 1}, "video_too_large", "64 × 48 pixels; the limit is 3071"),
        ({"video_s": 1.9}, "video_too_long", "the limit is 1.9 s"),
        ({"video_frames": 3}, "video_too_long", "too many frames at 2 frames a second; the limit is 3"),
        ({"decode_s": 1e-9}, "video_too_slow", "takes more than 1e-09 s"),
    ],
)
def test_a_video_beyond_a_limit_is_refused(limits: Any, code: str, reason: str) -> None:
    refusal = refused(video_file(), **limits)
    assert refusal.code == code
    assert reason in str(refusal)
    with pytest.raises(InvalidRequest, match=reason):
        sample_frames(noise(60, 48, 64, 3), 30, 0, given := MediaLimits(**limits), fit, Deadline(given.decode_s))


def test_a_wrong_duration_in_the_header_does_not_evade_the_limit() -> None:
    file = bytearray(video_file(60, fps=30, format="mp4", codec="libx264"))
    for box in (b"mvhd", b"mdhd"):
        place = file.index(box) + 4 + 16  # duration, after version and flags, two times and the scale
        file[place : place + 4] = (1).to_bytes(4, "big")
    assert refused(bytes(file), video_s=1.0).code == "video_too_long"


def test_a_playlist_is_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "private.ts").write_bytes(video_file(format="mpegts", codec="libx264"))
    playlist = b"ffconcat version 1.0\nfile private.ts\n"
    with av.open(io.BytesIO(playlist)) as followed:  # by default it is
        assert len(list(followed.decode(video=0))) == 60
    assert refused(playlist).code == "invalid_video"


@pytest.mark.parametrize(
    "data", [b"no video", video_file(format="mp4", codec="libx264")[:-900], b"RIFF\x00\x00\x00\x00WAVEfmt "]
)
def test_a_broken_file_or_another_format_is_refused(data: bytes) -> None:
    refusal = refused(data)
    assert refusal.code == "invalid_video"
    assert "video 0: this file cannot be read; accepted: mov, mp4" in str(refusal)


@pytest.mark.parametrize(
    ("format", "codec"),
    [
        ("mp4", "libx264"),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in (("webm", "libvpx-vp9"), ("avi", "mpeg4"))),
    ],
)
def test_a_file_with_any_changed_bytes_is_decoded_or_refused(format: str, codec: str) -> None:
    rng, file = random.Random(7), video_file(20, format=format, codec=codec)
    outcomes = set()
    for _ in range(150):
        data = bytearray(file)
        for _ in range(rng.choice((1, 2, 20))):
            data[rng.randrange(min(len(data), rng.choice((64, len(data)))))] = rng.randrange(256)
        try:
            outcomes.add(decode_video(bytes(data), 0, LIMITS, fit, Deadline(5)).pixels.shape[3])
            decode_sound(bytes(data), 0, 10.0, Deadline(60))
        except InvalidRequest as refusal:
            outcomes.add(refusal.code.partition("_")[0])
    assert outcomes >= {3, "invalid"}
