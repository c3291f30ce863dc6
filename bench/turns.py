"""`python -m bench.turns`: how soon detectors find starts and ends of speech, and what a session costs.

hibari speaks ``SENTENCES``, which are cut to what is audible: -40 dB below the peak and louder. Between two sentences
are ``PAUSE_S`` of silence. White noise is added with a seed, at 20 and 10 dB below the speech. The sound is heard by a
detector alone, and as a realtime session hears it: in the formats of clients, decoded and resampled. It comes in chunks
of 20 ms. All delays are positions in the stream, not times of a clock: from a sentence's first or last sample to the
end of the chunk with which the detector found its start or end. The cost is CPU time of the process.

At the end it prints whether the bounds are met, each in the worst case, and exits with 1 when one is not.
"""

from __future__ import annotations

import functools
import itertools
import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import click
import numpy as np
import soxr
from rich.console import Console

from bench.bounds import Bound, finite, quantile, show_bounds
from omni_actors import turns
from omni_actors.serve.realtime.config import PCM, PCMU, AudioFormat
from omni_actors.serve.realtime.sound import SoundDecoder, bytes_per_s, encode, rate_of

RATE = turns.SAMPLE_RATE
NOISE_DB: tuple[int | None, ...] = (None, 20, 10)
PAUSE_S = 2.0
CHUNK_S = 0.02
SENTENCES = (
    "What is the capital of France?",
    "Tell me a story about a fox.",
    "I would like to book a table for two people, please.",
    "How far is the moon?",
    "Yes, I think so.",
    "When I was young, we lived in a small house by the sea.",
    "Can you tell me what the weather will be like tomorrow in London?",
    "The train leaves at nine, and it arrives at noon.",
    "Please turn off the light in the kitchen.",
    "My name is Anna and I live in Berlin.",
    "Thank you very much for your help.",
    "Is there a good restaurant near the station?",
    "Stop, please.",
    "I have never seen anything like that before.",
    "Could you repeat the last part?",
    "If it rains tomorrow, we will stay at home.",
    "She bought apples, bread and cheese.",
    "Who wrote that book?",
    "Set a timer for ten minutes.",
    "No, that is not what I meant.",
)
UNFINISHED = ("The train leaves at nine, and", "So what I mean is")
"""Sentences that break off, and that the model does not find finished."""
FORMATS: dict[str, AudioFormat | None] = {"detector": None, "audio/pcm": PCM(), "audio/pcmu": PCMU()}
"""How the sound reaches the detector: without a session, or in a format of clients."""
SETTINGS: dict[str, turns.TurnDetection] = {"server_vad": turns.ServerVad(), "semantic_vad": turns.SemanticVad()}
START_MS = 250
"""From the first sample of a sentence to its start, at the 95th percentile."""
END_MS = {"server_vad": turns.ServerVad().silence_duration_ms + 100, "semantic_vad": 400}
"""From the last sample of a turn to its end, at the 95th percentile."""
CPU_PERCENT = 2
"""What one session may cost, of one core."""
Sound: TypeAlias = np.ndarray[Any, np.dtype[np.float32]]


@functools.cache
def _voice() -> Any:
    from hibari import Hibari  # only the extra "voice" has it

    return Hibari(threads=1)


@functools.cache
def say(text: str) -> Sound:
    """Return the audible part of hibari's speech: float32 (n,), 16 kHz. Leave it as it is."""
    sound = soxr.resample(_voice()(text, seed=0), 24_000, RATE).astype(np.float32)
    audible = np.flatnonzero(np.abs(sound) >= 0.01 * np.abs(sound).max())
    return np.asarray(sound[audible[0] : audible[-1] + 1])


class Conversation(NamedTuple):
    """Sentences with pauses between them."""

    sound: Sound
    """float32 (n,), 16 kHz."""
    spoken_ms: list[tuple[float, float]]
    """Where each sentence begins and ends."""


def converse(sentences: list[Sound], noise_db: int | None, seed: int = 0) -> Conversation:
    """Return the sentences with a pause before, between and after them, and noise ``noise_db`` below the speech."""
    pause = np.zeros(int(PAUSE_S * RATE), np.float32)
    parts, spoken_ms, position = [pause], [], len(pause)
    for sentence in sentences:
        spoken_ms.append((position * 1000 / RATE, (position + len(sentence)) * 1000 / RATE))
        parts += [sentence, pause]
        position += len(sentence) + len(pause)
    sound = np.concatenate(parts)
    if noise_db is not None:
        power = np.mean(np.square(np.concatenate(sentences)))
        noise = np.random.default_rng(seed).standard_normal(len(sound)) * np.sqrt(power) / 10 ** (noise_db / 20)
        sound = sound + noise.astype(np.float32)
    return Conversation(sound, spoken_ms)


class Found(NamedTuple):
    """What a detector found in a conversation."""

    start_delays_ms: list[float]
    end_delays_ms: list[float]
    """One for each sentence with one start and one end."""
    wrong: int
    """How many sentences were cut, missed or joined."""
    cpu_s: float


def listen(settings: turns.TurnDetection, conversation: Conversation, format: AudioFormat | None = None) -> Found:
    """Feed a conversation to a new detector, in chunks. format: that of a session's client; None: samples at 16 kHz."""
    detector = turns.open_detector(settings)
    starts, ends = list[float](), list[float]()
    chunks = _samples(conversation.sound) if format is None else _decoded(conversation.sound, format)
    began = time.process_time()
    for number, samples in enumerate(chunks):
        for event in detector.feed(samples):
            found_ms = 1000 * CHUNK_S * (number + 1)
            (starts if isinstance(event, turns.SpeechStarted) else ends).append(found_ms)
    cpu_s = time.process_time() - began
    start_delays, end_delays, wrong = [], [], 0
    for begin, end in conversation.spoken_ms:
        limit = end + PAUSE_S * 1000
        mine = [[at for at in found if begin <= at < limit] for found in (starts, ends)]
        if [len(found) for found in mine] != [1, 1] or mine[1][0] < end:
            wrong += 1
            continue
        start_delays.append(mine[0][0] - begin)
        end_delays.append(mine[1][0] - end)
    return Found(start_delays, end_delays, wrong, cpu_s)


def _samples(sound: Sound) -> Iterator[Sound]:
    size = round(RATE * CHUNK_S)
    for at in range(0, len(sound), size):
        yield sound[at : at + size]


def _decoded(sound: Sound, format: AudioFormat) -> Iterator[Sound]:
    """Yield a sound as a session hears it whose client sends it in ``format``."""
    data = encode(np.asarray(soxr.resample(sound, RATE, rate_of(format)), np.float32), format)
    decoder, size = SoundDecoder(format, RATE), round(bytes_per_s(format) * CHUNK_S)
    for at in range(0, len(data), size):
        yield decoder.push(data[at : at + size])


def bounds(rows: Sequence[dict[str, Any]]) -> list[Bound]:
    """Return the bounds of each kind of detection, with what its worst row has."""
    found = list[Bound]()
    for kind in SETTINGS:
        mine = [row for row in rows if row["detection"] == kind]
        start_ms, end_ms = (max(row[name][1] for row in mine) for name in ("start_ms", "end_ms"))
        found += [
            Bound(f"{kind}: sentences cut, missed or joined", sum(row["wrong"] for row in mine), 0),
            Bound(f"{kind}: start found, p95", start_ms, START_MS, "ms"),
            Bound(f"{kind}: end found, p95", end_ms, END_MS[kind], "ms"),
            Bound(f"{kind}: CPU time", max(row["cpu_percent"] for row in mine), CPU_PERCENT, "% of a core"),
        ]
    return found


@click.command()
@click.option("--json", "file", type=click.Path(path_type=Path), help="Write the figures to this file.")
def main(file: Path | None) -> None:
    """Print one line for each kind of detection, each format and each noise, and whether the bounds are met."""
    spoken = [say(text) for text in SENTENCES]
    rows = []
    for kind, settings in SETTINGS.items():
        turns.open_detector(settings)  # loads the models
        for (format, heard), noise_db in itertools.product(FORMATS.items(), NOISE_DB):
            conversation = converse(spoken, noise_db)
            found = listen(settings, conversation, heard)
            rows.append(
                {
                    "detection": kind,
                    "format": format,
                    "noise_db": noise_db,
                    "sentences": len(spoken),
                    "wrong": found.wrong,
                    "start_ms": [round(quantile(found.start_delays_ms, p), 1) for p in (50, 95, 100)],
                    "end_ms": [round(quantile(found.end_delays_ms, p), 1) for p in (50, 95, 100)],
                    "cpu_percent": round(100 * found.cpu_s / (len(conversation.sound) / RATE), 2),
                }
            )
            click.echo(json.dumps(finite(rows[-1])))
    if file is not None:
        file.write_text(json.dumps(finite(rows), indent=1))
    found_bounds = bounds(rows)
    show_bounds(Console(), found_bounds)
    sys.exit(0 if all(each.is_met for each in found_bounds) else 1)


if __name__ == "__main__":
    main()
