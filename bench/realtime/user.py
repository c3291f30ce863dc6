"""A user of a hands-free session: a microphone, a player, and what the client's events say.

Rules
1. The microphone sends a block of sound as soon as its last sample has been recorded. A block that is late is sent at
   once, and later blocks are not moved: the times of samples are those of a clock, not those of sending.
2. The player plays an answer as soon as it arrives, with ``playback.BUDGET_S`` of budget.
3. A connection that ends early raises ``openai``'s or ``websockets``' error out of ``talking``. The client does not
   connect again.
"""

from __future__ import annotations

import asyncio
import base64
import functools
import math
import time
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import numpy as np
import openai
import soxr
import websockets

from bench import turns
from omni_actors.playback import BUDGET_S, Playback

RATE = 24_000
BLOCK_S = 0.04
SHORT_BLOCK_S = 0.02
"""The duration of a block of sound where delays are measured, as in ``bench.turns``: what is found in a block waits for
its end."""
_BYTES_PER_S = 2 * RATE


SESSION_ERRORS = (OSError, websockets.WebSocketException, openai.OpenAIError)
"""What ends a session early, out of ``talking``. OSError has TimeoutError."""


def reasons(group: BaseExceptionGroup[BaseException]) -> str:
    """Return the errors of a group and of the groups within it, in words."""
    return "; ".join(reasons(each) if isinstance(each, BaseExceptionGroup) else repr(each) for each in group.exceptions)


@functools.cache
def say(text: str) -> turns.Sound:
    """Return the audible part of hibari's speech: float32 (n,), 24 kHz. Leave it as it is."""
    return at_rate(turns.say(text))


def at_rate(sound: turns.Sound) -> turns.Sound:
    """Return a sound of ``bench.turns`` at the rate of the microphone. It is as long as before."""
    return np.asarray(soxr.resample(sound, turns.RATE, RATE), np.float32)


class Spoken(NamedTuple):
    """When the first and the last sample were spoken, in seconds of ``time.monotonic``.

    position_s: of the first sample, in the sound of the session.
    """

    begins: float
    ends: float
    position_s: float


class Underrun(NamedTuple):
    """A gap that the user heard. at: when the player had played everything, in seconds of ``time.monotonic``."""

    at: float
    gap_s: float


class Answer:
    """One response, as the user heard it.

    Attributes:
        sound: PCM16 of all sound that arrived. began: set with the first sound.
        first_s, last_s: when the first and the last sound arrived, in seconds of ``time.monotonic``.
        status, reason: of ``response.done``; the reason is empty for a completed one.
    """

    def __init__(self) -> None:
        self.player, self.sound, self.text = Playback(), bytearray(), ""
        self.first_s = self.last_s = math.nan
        self.underruns: list[Underrun] = []
        self.status = self.reason = ""
        self.began = asyncio.Event()

    def hear(self, now: float, data: bytes) -> None:
        """Take sound that has arrived."""
        gap_s = self.player.feed(now, len(data) / _BYTES_PER_S)
        if gap_s:
            self.underruns.append(Underrun(now + BUDGET_S - gap_s, gap_s))
        self.first_s = self.first_s if self.sound else now
        self.last_s = now
        self.sound += data
        self.began.set()

    @property
    def heard_s(self) -> float:
        """The duration of the sound that has arrived."""
        return len(self.sound) / _BYTES_PER_S

    def played_s(self, now: float) -> float:
        """Return how much of the sound was played."""
        return min(self.heard_s, max(0.0, self.heard_s - self.player.ahead_s(now)))


class Microphone:
    """Sends what the user says, and white noise, at real time.

    Args:
        connection: of the session.
        noise: the RMS of the noise, of a full scale of 1.
        block_s: the duration of a block.

    Attributes:
        late_s: how late each block was sent. It is the client's share of all delays.
    """

    def __init__(self, connection: Any, noise: float, block_s: float) -> None:
        self._connection, self._noise, self._block_s = connection, noise, block_s
        self._random = np.random.default_rng(0)
        self._speech = np.empty(0, np.float32)
        self.late_s: list[float] = []
        self._began, self._blocks = 0.0, 0

    async def run(self) -> None:
        """Send sound until cancelled."""
        self._began = time.monotonic()
        size = round(RATE * self._block_s)
        while True:
            block, self._speech = self._speech[:size], self._speech[size:]
            self._blocks += 1
            sound = self._noise * self._random.standard_normal(size)
            sound[: len(block)] += block
            data = (sound.clip(-1, 1) * 32767).astype("<i2").tobytes()
            due = self._began + self._blocks * self._block_s
            await asyncio.sleep(due - time.monotonic())
            self.late_s.append(time.monotonic() - due)
            await self._connection.input_audio_buffer.append(audio=base64.b64encode(data).decode())

    def say(self, sound: turns.Sound) -> Spoken:
        """Speak with the next block. Nothing else is being said. Return when."""
        assert not len(self._speech)
        self._speech = sound
        position_s = self._blocks * self._block_s
        begins = self._began + position_s
        return Spoken(begins, begins + len(sound) / RATE, position_s)


class User:
    """One session.

    Attributes:
        microphone: see there.
        answer: the latest response, empty before the first one.
        errors: the messages of ``error`` events.
    """

    def __init__(self, connection: Any, noise: float, block_s: float) -> None:
        self.connection, self.microphone = connection, Microphone(connection, noise, block_s)
        self.answer, self.errors = Answer(), list[str]()
        self._events: defaultdict[str, asyncio.Queue[tuple[float, Any]]] = defaultdict(asyncio.Queue)

    async def wait(self, type: str) -> tuple[float, Any]:
        """Return the next event of this type that was not returned before, and when it arrived."""
        return await self._events[type].get()

    def seen(self, type: str) -> list[tuple[float, Any]]:
        """Return all events of this type that were not returned before."""
        queue = self._events[type]
        return [queue.get_nowait() for _ in range(queue.qsize())]

    async def listen(self) -> None:
        """Take the events of the session until cancelled. Raises ConnectionError: the server closed it."""
        async for event in self.connection:
            now = time.monotonic()
            match event.type:
                case "response.created":
                    self.answer = Answer()
                case "response.output_audio.delta":
                    self.answer.hear(now, base64.b64decode(event.delta))
                    continue
                case "response.output_audio_transcript.delta":
                    self.answer.text += event.delta
                    continue
                case "response.done":
                    self.answer.status = event.response.status
                    self.answer.reason = str(event.response.status_details)
                case "error":
                    self.errors.append(event.error.message)
            self._events[event.type].put_nowait((now, event))
        raise ConnectionError("the server closed the session")


@asynccontextmanager
async def talking(
    client: openai.AsyncOpenAI, config: dict[str, Any], noise: float, block_s: float = BLOCK_S
) -> AsyncIterator[User]:
    """Open a session with a configuration, and a microphone that is on. noise, block_s: see ``Microphone``.

    Raises ExceptionGroup: the session ended early.
    """
    async with client.realtime.connect(max_retries=0) as connection:
        user = User(connection, noise, block_s)
        async with asyncio.TaskGroup() as tasks:
            listening = tasks.create_task(user.listen())
            await connection.session.update(session=config)  # type: ignore[arg-type]  # a TypedDict
            await user.wait("session.updated")
            recording = tasks.create_task(user.microphone.run())
            await asyncio.sleep(0)  # so the microphone has begun
            yield user
            recording.cancel()
            listening.cancel()


def rms(sound: turns.Sound) -> float:
    return float(np.sqrt(np.mean(np.square(sound))))


def noise_below(sound: turns.Sound, db: int | None) -> float:
    """Return the RMS of noise that is so many dB below a sound; 0.0 without noise."""
    return 0.0 if db is None else rms(sound) / 10 ** (db / 20)
