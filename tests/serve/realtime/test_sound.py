"""Audio formats: PCM16 and G.711 in any pieces, resampling, and the times at which sound leaves."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_actors.outputs import AudioChunk
from omni_actors.serve.http.errors import HTTPError
from omni_actors.serve.realtime.config import PCM, PCMA, PCMU, AudioFormat
from omni_actors.serve.realtime.input_audio import InputAudio, recording_of
from omni_actors.serve.realtime.pacer import Pacer
from omni_actors.serve.realtime.sound import SoundDecoder, SoundEncoder, bytes_per_s, decode, encode

FORMATS = (PCM(), PCMU(), PCMA())


def sine(rate: int, seconds: float = 0.5, hertz: int = 300) -> np.ndarray:
    return (0.5 * np.sin(2 * np.pi * hertz * np.arange(round(rate * seconds)) / rate)).astype(np.float32)


@pytest.mark.parametrize(("format", "error"), [(PCM(), 1e-4), (PCMU(), 0.02), (PCMA(), 0.02)])
def test_sound_survives_a_format(format: AudioFormat, error: float) -> None:
    samples = sine(8000)
    data = encode(samples, format)
    assert len(data) == bytes_per_s(format) * len(samples) // (24000 if isinstance(format, PCM) else 8000)
    assert np.abs(decode(data, format) - samples).max() < error


def test_the_laws_of_g711() -> None:
    """Values of ITU-T G.711: the codes of silence, and of the largest samples."""
    assert decode(b"\xff\x00\x80", PCMU()) * 32768 == pytest.approx([0, -32124, 32124])
    assert decode(b"\xd5\x55\xaa\x2a", PCMA()) * 32768 == pytest.approx([8, -8, 32256, -32256])
    assert encode(np.float32([0, 1, -1]), PCMU()) == b"\xff\x80\x00"
    assert encode(np.float32([0, 1, -1]), PCMA())[1:] == b"\xaa\x2a"


def test_the_encoder_resamples_without_a_seam() -> None:
    encoder = SoundEncoder(PCM())
    tone = sine(16000)
    data = b"".join(encoder.push(AudioChunk(tone[at : at + 777], 16000)) for at in range(0, len(tone), 777))
    found = decode(data + encoder.finish(), PCM())
    assert abs(len(found) - 12000) <= 1
    assert np.abs(found[1000:-1000] - sine(24000)[1000 : len(found) - 1000]).max() < 0.01


@given(st.lists(st.integers(0, 999), min_size=1, max_size=30).filter(any))
def test_the_decoder_resamples_pieces_of_any_size_with_little_delay(sizes: list[int]) -> None:
    """And tones that the lower rate cannot have do not come back as lower ones."""
    decoder, data = SoundDecoder(PCM(), 16_000), encode(sine(24_000) + sine(24_000, hertz=11_000), PCM())
    found, taken = np.empty(0, np.float32), 0
    for size in itertools.cycle(sizes):
        if taken >= len(data):
            break
        found = np.concatenate([found, decoder.push(data[taken : taken + size])])
        taken += size
        assert min(taken, len(data)) // 2 * 2 / 3 - len(found) <= 16 * 1.5, "samples of 1.5 ms are missing"
    delay = 23 * 16_000 / 24_000
    expected = 0.5 * np.sin(2 * np.pi * 300 * (np.arange(len(found)) - delay) / 16_000)
    assert np.abs(found - expected)[100:].max() < 0.02


@given(st.sampled_from(FORMATS), st.lists(st.integers(0, 999), max_size=30))
def test_a_buffer_takes_pieces_of_any_size(format: AudioFormat, sizes: list[int]) -> None:
    sound = bytes(range(256)) * 120
    buffer, at = InputAudio(most_s=10.0), 0
    for size in sizes:
        buffer.append(sound[at : at + size], format)
        at += size
    assert buffer.end_ms(format) == pytest.approx(1000 * at / bytes_per_s(format))
    if at < bytes_per_s(format) / 10:
        with pytest.raises(HTTPError, match="100 ms or more"):
            buffer.recording(format)
        assert buffer.nbytes == at
        return
    recording = buffer.recording(format)
    buffer.clear(format)
    assert sound.startswith(recording.data)
    assert at - len(recording.data) == (at % 2 if isinstance(format, PCM) else 0)
    assert buffer.nbytes == 0


@pytest.mark.parametrize("format", FORMATS)
def test_the_recording_of_an_item_has_bounds_and_its_error_names_the_place(format: AudioFormat) -> None:
    second = bytes(bytes_per_s(format))
    assert recording_of(second + b"\0", format, 1.001, "here").duration_s == pytest.approx(1.0, abs=0.001)
    for data in (b"", second[: len(second) // 11], second * 2):
        with pytest.raises(HTTPError, match=r"here: .* ms of sound; accepted: 100 to 1001 ms") as refused:
            recording_of(data, format, 1.001, "here")
        assert (refused.value.code, refused.value.param) == ("invalid_value", "here")


def test_a_length_that_is_refused_is_not_rounded_to_one_that_is_accepted() -> None:
    buffer = InputAudio(most_s=1.0)
    buffer.append(bytes(799), PCMU())
    with pytest.raises(HTTPError, match="has 99 ms of sound; accepted: 100 ms or more"):
        buffer.recording(PCMU())
    for size, found in ((799, 99), (8001, 1001)):
        with pytest.raises(HTTPError, match=f"here: {found} ms of sound; accepted: 100 to 1000 ms"):
            recording_of(bytes(size), PCMU(), 1.0, "here")


def test_a_buffer_is_bounded() -> None:
    buffer = InputAudio(most_s=1.0)
    buffer.append(bytes(48000), PCM())
    with pytest.raises(HTTPError, match="the buffer holds 1 s"):
        buffer.append(b"\0", PCM())
    assert buffer.nbytes == 48000


@given(st.lists(st.tuples(st.floats(0.01, 1), st.floats(0, 3)), max_size=40))
def test_sound_leaves_a_little_ahead_of_real_time(chunks: list[tuple[float, float]]) -> None:
    """Chunks of any duration, computed at any speed."""
    pacer, now, begin, total = Pacer(2.0), 100.0, 100.0, 0.0
    for duration, computed_after in chunks:
        now += computed_after
        now += pacer.wait_s(now)
        pacer.sent(now, duration)
        total += duration
        assert pacer.sent_s == pytest.approx(total)
        assert pacer.sent_s - pacer.played_s(now) <= 2.0 + duration + 1e-6
        assert pacer.played_s(now) <= now - begin + 1e-6
        assert pacer.wait_s(now + duration) == pytest.approx(0, abs=1e-9)
    assert pacer.played_s(now + total + 1) == pytest.approx(total)


def test_fast_sound_is_not_held_back_at_the_begin() -> None:
    pacer = Pacer(2.0)
    waits = []
    for _ in range(15):
        waits.append(pacer.wait_s(0.0))
        pacer.sent(0.0, 0.2)
    assert waits[:10] == [0.0] * 10
    assert waits[-1] == pytest.approx(0.9)


def test_sound_is_played_behind_that_of_the_answer_before() -> None:
    first = Pacer(2.0)
    first.sent(0.0, 1.9)
    second = Pacer(2.0, ends=first.ends)
    assert second.unplayed_s(1.0) == pytest.approx(1.0)
    second.sent(1.0, 1.9)
    assert second.wait_s(1.0) == pytest.approx(0.9)
    assert [first.played_s(at) for at in (1.0, 2.0, 3.0)] == pytest.approx([0.9, 1.9, 1.9])
    assert [second.played_s(at) for at in (1.0, 2.0, 3.0, 5.0)] == pytest.approx([0.0, 0.0, 1.0, 1.9])
    late = Pacer(2.0, ends=second.ends)
    late.sent(10.0, 1.0)
    assert [late.played_s(at) for at in (10.1, 10.6)] == pytest.approx([0.0, 0.5])


def test_sound_is_played_sooner_when_that_of_the_answer_before_is_dropped() -> None:
    first = Pacer()
    first.sent(0.0, 1.9)
    second = Pacer(ends=first.ends)
    second.sent(0.5, 1.0)
    assert second.played_s(1.0) == 0.0
    second.play_sooner(first.dropped_s(0.5))
    assert first.dropped_s(0.5) == pytest.approx(1.5)
    assert second.played_s(1.0) == pytest.approx(0.5)
    assert second.unplayed_s(1.0) == pytest.approx(0.5)


def test_nothing_counts_as_played_before_the_player_begins() -> None:
    pacer = Pacer()
    pacer.sent(10.0, 1.0)
    assert [pacer.played_s(at) for at in (10.0, 10.1, 10.6, 12.0)] == pytest.approx([0.0, 0.0, 0.5, 1.0])
