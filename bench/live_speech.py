"""`python -m bench.live_speech`: speech from text that arrives word by word, against text that arrives in sentences.

The text has 30 sentences. Its words arrive

whole      all at once, as one string
sentences  one sentence at a time, the next one as soon as it is taken
words      one word at a time, the next one as soon as it is taken
paced      one word at a time, as a language model makes them (``WORDS_S``)

First sound counts from the moment at which the last word of the first sentence was taken. A simulated player begins at
the first sound and plays in real time; it underruns when a chunk arrives after the one before it has been played.
"""

from __future__ import annotations

import itertools
import json
import math
import statistics
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import click
import msgspec
import numpy as np
import trio
from rich.console import Console
from rich.table import Table

from omni_actors import AudioChunk, OmniSystem
from omni_actors.config import Pipeline, load

OPENINGS = ("The harbour wakes slowly", "A gull cries over the pier", "The old boat leaves at seven")
MIDDLES = ("and the road is empty", "while the tide turns", "because the wind has dropped", "as it did in other years")
ENDINGS = ("today.", "once more!", "before the sun is high.", "and is that not enough?", "at 3.30 in the morning.")
SENTENCES = [f"{OPENINGS[n % 3]}, {MIDDLES[n % 4]}, {ENDINGS[n % 5]}" for n in range(30)]
TEXT = " ".join(SENTENCES)
WORDS_S = 30.0
"""Words a second: several times as fast as speech."""
BOUND = 1.2
Row = dict[str, Any]


def pipeline() -> Pipeline:
    """The voice pipeline without the stages that a text to speak does not enter."""
    voice = load("voice")
    acoustic = msgspec.structs.replace(voice.stages["acoustic"], inputs=())
    return msgspec.structs.replace(voice, stages={"acoustic": acoustic, "vocoder": voice.stages["vocoder"]})


class Text:
    """The text as an input. ``ready`` is when the last word of the first sentence was taken."""

    def __init__(self, way: str) -> None:
        self.ready = math.nan
        self._pause_s = 1 / WORDS_S if way == "paced" else 0.0
        cut = SENTENCES if way == "sentences" else TEXT.split()
        self._parts = [f"{part} " for part in cut]
        self.input: str | AsyncIterator[str] = TEXT if way == "whole" else self._arrive()

    async def _arrive(self) -> AsyncIterator[str]:
        arrived = 0
        for part in self._parts:
            if self._pause_s:
                await trio.sleep(self._pause_s)
            arrived += len(part)
            if math.isnan(self.ready) and arrived >= len(SENTENCES[0]):
                self.ready = time.monotonic()
            yield part


async def speak(omni: OmniSystem, way: str) -> tuple[Row, np.ndarray[Any, Any]]:
    """Speak the text in one request, and play it."""
    began, text = time.monotonic(), Text(way)
    generation = omni.generate(script=text.input, modalities=("audio",), seed=1)
    arrivals = [(time.monotonic(), out.delta) async for out in generation if isinstance(out.delta, AudioChunk)]
    first_at = arrivals[0][0]
    played = itertools.accumulate((chunk.duration_s for _, chunk in arrivals), initial=first_at)
    leads = [until - at for (at, _), until in zip(arrivals[1:], itertools.islice(played, 1, None), strict=False)]
    ready = began if math.isnan(text.ready) else text.ready
    row = {
        "first_sound_s": first_at - ready,
        "submitted_to_first_s": first_at - began,
        "total_s": arrivals[-1][0] - began,
        "audio_s": sum(chunk.duration_s for _, chunk in arrivals),
        "underruns": sum(lead < 0 for lead in leads),
        "least_lead_s": min(leads),
    }
    return row, np.concatenate([chunk.samples for _, chunk in arrivals])


async def measure(rounds: int) -> Row:
    rows: dict[str, list[Row]] = {way: [] for way in ("whole", "sentences", "words", "paced")}
    same = True
    async with OmniSystem.open(pipeline()) as omni:
        _, expected = await speak(omni, "whole")  # the warm-up
        for _, way in itertools.product(range(rounds), rows):
            row, sound = await speak(omni, way)
            rows[way].append(row)
            same = same and np.array_equal(sound, expected)
    return {
        "rows": {way: medians(found) for way, found in rows.items()},
        "underruns": {way: sum(row["underruns"] for row in found) for way, found in rows.items()},
        "same_sound": same,
        "rounds": rounds,
    }


def medians(rows: list[Row]) -> Row:
    return {key: statistics.median(row[key] for row in rows) for key in rows[0]}


@click.command()
@click.option("--rounds", type=click.IntRange(min=1), default=10, show_default=True, help="Rounds after a warm-up.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write the figures here.")
def main(rounds: int, json_file: Path | None) -> None:
    """Measure, print a table, and exit with 1 if a bound is not met."""
    result = trio.run(measure, rounds)
    console, rows = Console(), result["rows"]
    table = Table(f"medians of {rounds}", "first sound", "from submission", "total", "sound", "least lead", "underruns")
    for way, row in rows.items():
        keys = ("first_sound_s", "submitted_to_first_s", "total_s", "audio_s", "least_lead_s")
        table.add_row(way, *(f"{row[key]:.3f} s" for key in keys), str(result["underruns"][way]))
    console.print(table)
    ratios = {way: rows[way]["first_sound_s"] / rows["sentences"]["first_sound_s"] for way in ("words", "paced")}
    for way, ratio in ratios.items():
        console.print(f"first sound, {way} / sentences: {ratio:.3f}  (bound: {BOUND})")
    console.print(f"the same sound in all: {result['same_sound']}")
    if json_file is not None:
        json_file.write_text(json.dumps({**result, "ratios": ratios}, indent=1))
    if not result["same_sound"] or any(result["underruns"].values()) or max(ratios.values()) > BOUND:
        sys.exit(1)


if __name__ == "__main__":
    main()
