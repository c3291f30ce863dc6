"""Sentences with pauses between them, in sessions with each kind of turn detection and each noise, all at a time.

The sound is that of ``bench.turns``, which measures the detectors alone, in positions of the stream. Here, delays end
when the event has arrived. The sessions begin one after the other, so that their sentences do not end together.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Any

from bench import turns
from bench.realtime.server import Server, config
from bench.realtime.user import SESSION_ERRORS, SHORT_BLOCK_S, Spoken, at_rate, reasons, talking
from omni_actors.stress.report import percentile

AFTER_S = 5.0
"""How long the session lasts behind the last pause: events may be late."""
STAGGER_S = 0.65
"""Between the starts of two sessions."""


@dataclass
class Heard:
    """What one session found. Delays are seconds from the first and from the last audible sample of a sentence.

    positions_s: as ``ends_s``, but in the sound: where the server found the end.
    wrong: how many sentences were cut, missed or joined.
    late_s: how late the blocks of sound were sent, at the 95th percentile.
    lost: why the session ended early; empty if it did not.
    """

    detection: str
    noise_db: int | None
    starts_s: list[float]
    ends_s: list[float]
    positions_s: list[float]
    wrong: int
    late_s: float = 0.0
    lost: str = ""


async def listen(server: Server, heard: Heard, sentences: int, after_s: float) -> None:
    """Say sentences in one session, after some seconds."""
    await asyncio.sleep(after_s)
    conversation = turns.converse([turns.say(text) for text in turns.SENTENCES[:sentences]], heard.noise_db)
    asked = config(turn_detection={"type": heard.detection, "create_response": False})
    try:
        async with talking(server.client, asked, 0.0, SHORT_BLOCK_S) as user:
            spoken = user.microphone.say(at_rate(conversation.sound))
            await asyncio.sleep(spoken.ends - time.monotonic() + AFTER_S)
            heard.late_s = percentile(user.microphone.late_s, 95) or 0.0
            started, stopped = (user.seen(f"input_audio_buffer.speech_{name}") for name in ("started", "stopped"))
        compare(heard, spoken, conversation, started, stopped)
    except* SESSION_ERRORS as lost:
        heard.lost = reasons(lost)


def compare(
    heard: Heard,
    spoken: Spoken,
    conversation: turns.Conversation,
    started: list[tuple[float, Any]],
    stopped: list[tuple[float, Any]],
) -> None:
    """Add to ``heard`` the delays of the events that arrived, and the number of wrong sentences.

    An event belongs to a sentence by its place in the sound, however late it arrives. Because of the padding, a start
    may be in the pause before the sentence.
    """
    offset_ms = 1000 * spoken.position_s
    pause_ms = 1000 * turns.PAUSE_S
    for begin_ms, end_ms in conversation.spoken_ms:
        first, last = begin_ms + offset_ms, end_ms + offset_ms
        starts = [at for at, each in started if first - pause_ms / 2 <= each.audio_start_ms < last + pause_ms / 2]
        ends = [(at, each.audio_end_ms) for at, each in stopped if first <= each.audio_end_ms < last + pause_ms]
        if (len(starts), len(ends)) != (1, 1) or ends[0][1] < last:
            heard.wrong += 1
            continue
        heard.starts_s.append(starts[0] - spoken.begins - begin_ms / 1000)
        heard.ends_s.append(ends[0][0] - spoken.begins - end_ms / 1000)
        heard.positions_s.append((ends[0][1] - last) / 1000)


async def measure(server: Server, sentences: int, found: list[Heard]) -> None:
    """Say so many sentences in one session for each kind of detection and each noise, at the same time.

    found: gets what each session found.
    """
    for text in turns.SENTENCES[:sentences]:
        turns.say(text)  # it is kept; made in a session, it would hold up all users
    found += [Heard(detection, noise_db, [], [], [], 0) for detection in turns.SETTINGS for noise_db in turns.NOISE_DB]
    async with asyncio.TaskGroup() as tasks:
        for number, heard in enumerate(found):
            tasks.create_task(listen(server, heard, sentences, number * STAGGER_S))
