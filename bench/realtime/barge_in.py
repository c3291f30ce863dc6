"""The user speaks while an answer is played: how soon the sound ends, and whether the words that are kept were heard.

Each answer has a session of its own. The player stops when ``speech_started`` arrives, as the protocol asks of clients.
The words that were heard are found without the server: Whisper gives the times of the words in all sound that arrived,
and a word was heard when the player had reached its middle. Whisper's own times are off by some 0.1 s.
"""

from __future__ import annotations

import asyncio
import difflib
import functools
import math
import random
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import soxr

from bench import turns
from bench.realtime.server import Server, config
from bench.realtime.user import RATE, SESSION_ERRORS, SHORT_BLOCK_S, noise_below, reasons, say, talking
from omni_actors.stages import assets

STORIES = (
    "Tell me a long story about a fox.",
    "Describe a walk through a forest in five sentences.",
    "Explain in five sentences how bread is made.",
    "Write five sentences about the sea.",
)
MAX_TOKENS = 120
PLAYED_S = (0.5, 6.0)
"""How much of an answer is played before the user speaks."""
ANSWER_S = 120.0
_WORD = re.compile(r"\S+")


@dataclass
class BargeIn:
    """One interruption. Times are seconds from its first audible sample.

    Attributes:
        noise_db: how far below the speech the noise is; None without noise.
        played_s: how much of the answer was played when the player stopped.
        truncated_s: the same, as the server assumes.
        stopped_s: ``speech_started`` arrived, and the player stopped.
        last_s: the last sound arrived; 0.0 if it did before the first sample.
        done_s: ``response.done`` arrived.
        kept, heard: how many words of the answer the conversation keeps, and were heard.
        text: what was written of the answer. transcript: what the conversation keeps of it.
    """

    noise_db: int | None
    played_s: float
    truncated_s: float
    stopped_s: float
    last_s: float
    done_s: float
    kept: int
    heard: int
    text: str
    transcript: str

    @property
    def off(self) -> int:
        """How many words more are kept than were heard."""
        return self.kept - self.heard

    @property
    def is_prefix(self) -> bool:
        return self.text.split()[: self.kept] == self.transcript.split()


@functools.cache
def _whisper() -> Any:
    from faster_whisper import WhisperModel

    return WhisperModel(str(assets.resolve("whisper-tiny.en")), device="cpu", compute_type="float32", cpu_threads=1)


def words_heard(text: str, sound: bytes, played_s: float) -> int:
    """Return how many words of a text were heard. sound: PCM16 of a part of its speech that is long enough."""
    samples = np.frombuffer(sound, "<i2").astype(np.float32) / 32768
    segments, _ = _whisper().transcribe(soxr.resample(samples, RATE, 16_000), word_timestamps=True)
    timed = [(word.word, (word.start + word.end) / 2) for segment in segments for word in segment.words]
    return sum(middle <= played_s for middle in word_times(text, timed))


def word_times(text: str, timed: Sequence[tuple[str, float]]) -> list[float]:
    """Return the times of the words of a text, by those of the words that were recognized; inf behind the last one.

    A word that was not recognized gets its time from its neighbours.
    """
    written = [_letters(word) for word in _WORD.findall(text)]
    found = [_letters(word) for word, _ in timed]
    times = [math.nan] * len(written)
    for block in difflib.SequenceMatcher(None, written, found, autojunk=False).get_matching_blocks():
        for offset in range(block.size):
            times[block.a + offset] = timed[block.b + offset][1]
    known = [number for number, at in enumerate(times) if not math.isnan(at)]
    if not known:
        return [math.inf] * len(times)
    places = range(known[-1] + 1)
    filled = np.interp(places, [-1, *known], [0.0, *(times[number] for number in known)])
    return [float(at) for at in filled] + [math.inf] * (len(times) - len(filled))


def _letters(word: str) -> str:
    return "".join(character for character in word.lower() if character.isalnum())


async def interrupt(server: Server, text: str, words: str, noise_db: int | None, played_s: float) -> BargeIn:
    """Have a text answered, and say ``words`` when the player has played so much of it.

    Raises SESSION_ERRORS, or an ExceptionGroup of them.
    """
    sound = say(words)
    detection = {"type": "server_vad", "create_response": False}
    asked = {**config(turn_detection=detection), "max_output_tokens": MAX_TOKENS}
    noise = noise_below(sound, noise_db)
    async with asyncio.timeout(ANSWER_S), talking(server.client, asked, noise, SHORT_BLOCK_S) as user:
        connection = user.connection
        content = [{"type": "input_text", "text": text}]
        await connection.conversation.item.create(item={"type": "message", "role": "user", "content": content})
        await connection.response.create()
        await user.wait("response.created")
        await user.answer.began.wait()
        await asyncio.sleep(max(0.0, user.answer.first_s + played_s - time.monotonic()))
        begins = user.microphone.say(sound).begins
        stopped, _ = await user.wait("input_audio_buffer.speech_started")
        done, _ = await user.wait("response.done")
        _, truncated = await user.wait("conversation.item.truncated")
        await connection.conversation.item.retrieve(item_id=truncated.item_id)
        _, retrieved = await user.wait("conversation.item.retrieved")
        answer = user.answer
    played_s = answer.played_s(stopped)
    heard = await asyncio.to_thread(words_heard, answer.text, bytes(answer.sound), played_s)
    transcript = retrieved.item.content[0].transcript
    return BargeIn(
        noise_db=noise_db,
        played_s=played_s,
        truncated_s=truncated.audio_end_ms / 1000,
        stopped_s=stopped - begins,
        last_s=max(0.0, answer.last_s - begins),
        done_s=done - begins,
        kept=len(_WORD.findall(transcript)),
        heard=heard,
        text=answer.text,
        transcript=transcript,
    )


async def measure(server: Server, interruptions: int, found: list[BargeIn], errors: list[str]) -> None:
    """Interrupt so many answers, one after the other. found: gets each. errors: says why some are missing."""
    draw = random.Random(1)
    for number in range(interruptions):
        text, words = STORIES[number % len(STORIES)], draw.choice(turns.SENTENCES)
        noise_db, played_s = turns.NOISE_DB[number % len(turns.NOISE_DB)], draw.uniform(*PLAYED_S)
        try:
            found.append(await interrupt(server, text, words, noise_db, played_s))
        except* SESSION_ERRORS as failed:
            errors.append(f"interruption {number}: {reasons(failed)}")
