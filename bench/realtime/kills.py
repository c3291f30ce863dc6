"""Questions and answers in several sessions, while a stage is killed every ``every_s``, each stage in turn.

A session asks a question, hears the answer to its end, and asks the next one. Its user is beside white noise, 20 or 10
dB below the speech. A question is answered when its response is complete, or has all the tokens that it may have. An
underrun belongs to a death if the player ran dry between the death and the next sound of a stage that serves again: in
``LATEST_S`` after that at the latest.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import openai
import websockets

from bench.realtime.server import Server, config, serving
from bench.realtime.user import Underrun, User, noise_below, say, talking

STAGES = ("whisper", "llm", "acoustic", "vocoder")
STANDBYS = tuple(f"stages.{stage}.standby=1" for stage in STAGES)
VARIANTS: dict[str, tuple[bool, tuple[str, ...]]] = {
    "no deaths": (False, ()),
    "cold restart": (True, ()),
    "standby: 1": (True, STANDBYS),
}
"""Whether stages are killed, and changes of the pipeline."""
QUESTIONS = (
    "What is the capital of France?",
    "Why is the sky blue?",
    "Name a famous painter.",
    "What is the largest ocean?",
    "How many days are in a week?",
    "What do bees make?",
    "Who wrote Hamlet?",
    "What is ice made of?",
)
NOISE_DB = (20, 10)
INSTRUCTIONS = "You are a helpful assistant. Answer in one or two short sentences."
MAX_TOKENS = 64
PAUSE_S = 1.0
"""Between the end of an answer and the next question."""
ANSWER_S = 90.0
"""A question without an answer for so long is unanswered."""
POLL_S = 0.1
LATEST_S = 1.0


@dataclass
class Death:
    """at: when the worker was killed, in seconds of ``time.monotonic``. load_s: until the stage served again."""

    stage: str
    at: float
    load_s: float = float("inf")

    def explains(self, underrun: Underrun) -> bool:
        return self.at <= underrun.at <= self.at + self.load_s + LATEST_S


@dataclass
class Asked:
    """A question. first_s: from its last sample to the first sound of the answer. cuts: answers that noise cut."""

    session: int
    text: str
    at: float
    status: str = "unanswered"
    reason: str = ""
    answer: str = ""
    first_s: float = float("nan")
    sound_s: float = 0.0
    cuts: int = 0
    underruns: list[Underrun] = field(default_factory=list)

    @property
    def is_answered(self) -> bool:
        return self.status == "completed" or (self.status == "incomplete" and self.sound_s > 0)


@dataclass
class Run:
    """What happened. began: in seconds of ``time.monotonic``. load: the load average before and after."""

    variant: str
    seconds: float
    began: float = 0.0
    load: tuple[float, float] = (0.0, 0.0)
    asked: list[Asked] = field(default_factory=list)
    deaths: list[Death] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    @property
    def underruns(self) -> list[Underrun]:
        return [each for asked in self.asked for each in asked.underruns]

    @property
    def unexplained(self) -> list[Underrun]:
        """The underruns that belong to no death."""
        return [each for each in self.underruns if not any(death.explains(each) for death in self.deaths)]


async def ask(user: User, session: int, text: str) -> Asked:
    """Ask a question, and hear the answer to its end."""
    spoken = user.microphone.say(say(text))
    found = Asked(session, text, spoken.begins)
    try:
        async with asyncio.timeout(ANSWER_S + spoken.ends - spoken.begins):
            await user.wait("response.done")
            while user.answer.status == "cancelled":
                found.cuts += 1
                found.underruns += user.answer.underruns
                await user.wait("response.done")
    except TimeoutError:
        return found
    answer = user.answer
    found.status, found.reason, found.answer = answer.status, answer.reason, answer.text
    found.first_s, found.sound_s = answer.first_s - spoken.ends, answer.heard_s
    found.underruns += answer.underruns
    await asyncio.sleep(max(0.0, answer.player.ahead_s(time.monotonic())) + PAUSE_S)
    return found


async def converse(server: Server, run: Run, session: int, until: float) -> None:
    """Ask questions in one session until a time. A session that ends before is noted."""
    noise = noise_below(say(QUESTIONS[0]), NOISE_DB[session % len(NOISE_DB)])
    asked = {**config(), "instructions": INSTRUCTIONS, "max_output_tokens": MAX_TOKENS}
    try:
        async with talking(server.client, asked, noise) as user:
            for text in itertools.islice(itertools.cycle(QUESTIONS), 2 * session, None):
                if time.monotonic() >= until:
                    break
                run.asked.append(await ask(user, session, text))
            run.errors += user.errors
    except* (OSError, websockets.WebSocketException, openai.OpenAIError) as lost:
        run.lost.append(f"session {session}: {lost.exceptions}")


async def kill(server: Server, run: Run, every_s: float, until: float) -> None:
    """Kill a worker of each stage in turn, until a time, and find out when each stage serves again."""
    async with asyncio.TaskGroup() as tasks:
        for number, stage in enumerate(itertools.cycle(STAGES), 1):
            at = run.began + number * every_s
            if at >= until:
                break
            await asyncio.sleep(at - time.monotonic())
            death = Death(stage, time.monotonic())
            pid = await server.kill(stage)
            run.deaths.append(death)
            tasks.create_task(watch(server, death, pid))


async def watch(server: Server, death: Death, pid: int) -> None:
    """Wait until the stage serves again."""
    while True:
        if await server.serves(death.stage, but=pid):
            break
        await asyncio.sleep(POLL_S)
    death.load_s = time.monotonic() - death.at


async def measure(variant: str, *, sessions: int, seconds: float, every_s: float, overrides: Sequence[str]) -> Run:
    """Run the sessions for some seconds, and until each has its last answer."""
    is_deadly, changes = VARIANTS[variant]
    run = Run(variant, seconds)
    for text in QUESTIONS:
        say(text)  # it is kept; made in a session, it would hold up all users
    async with serving((*changes, *overrides)) as server:
        before = os.getloadavg()[0]
        run.began = time.monotonic()
        until = run.began + seconds
        async with asyncio.TaskGroup() as tasks:
            for session in range(sessions):
                tasks.create_task(converse(server, run, session, until))
            if is_deadly:
                tasks.create_task(kill(server, run, every_s, until))
        run.load = (before, os.getloadavg()[0])
    return run
