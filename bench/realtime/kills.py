"""Questions and answers in several sessions, while a stage is killed every ``every_s``, each stage in turn.

A session asks a question, hears the answer to its end, and asks the next one. Its user is beside white noise, 20 or 10
dB below the speech. A question is answered when its response is complete, or has all the tokens that it may have. An
underrun belongs to a death if the player ran dry between the death and the next sound of a stage that serves again: in
``LATEST_S`` after that at the latest.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import httpx

from bench.questions import QUESTIONS
from bench.realtime.server import Server, config, serving
from bench.realtime.user import SESSION_ERRORS, Underrun, User, noise_below, reasons, say, talking

STAGES = ("whisper", "llm", "acoustic", "vocoder")
STANDBYS = tuple(f"stages.{stage}.standby=1" for stage in STAGES)
WAITING = ("engine=bench.realtime.waiting:WaitingModel", "model=null", "options={}", "threads=1", "resumable=true")
VARIANTS: dict[str, tuple[bool, tuple[str, ...]]] = {
    "no deaths": (False, ()),
    "cold restart": (True, ()),
    "standby: 1": (True, STANDBYS),
    "standby: 1, llm waits": (True, (*STANDBYS, *(f"stages.llm.{change}" for change in WAITING))),
}
"""Whether stages are killed, and changes of the pipeline."""
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

    def described(self, underrun: Underrun) -> str:
        """Return when this was, seen from an underrun."""
        load = f"its load took {self.load_s:.1f} s" if self.load_s < float("inf") else "it did not serve again"
        return f"killed {underrun.at - self.at:.1f} s before, {load}"


@dataclass
class Asked:
    """A question.

    Attributes:
        at: when it began, in seconds of ``time.monotonic``.
        first_s: from its last sample to the first sound of the answer.
        cuts: answers that noise cut.
    """

    session: int
    text: str
    at: float = 0.0
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

    @property
    def outcome(self) -> str:
        return f"{self.status} {self.reason}".strip()


@dataclass
class Run:
    """What happened in one variant.

    Attributes:
        variant, seconds: the plan: how long questions are asked.
        began: in seconds of ``time.monotonic``. lasted_s: until the last answer.
        load: the load average before and after.
        lost: the sessions that ended early. errors: what else went wrong.
    """

    variant: str
    seconds: float
    began: float = 0.0
    lasted_s: float = 0.0
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
        """The underruns that no death explains."""
        return [each for each in self.underruns if not any(death.explains(each) for death in self.deaths)]

    @property
    def may_underrun(self) -> bool:
        """Whether loads may be heard: nothing serves in place of a stage that loads."""
        return self.variant == "cold restart"

    def cause(self, underrun: Underrun) -> str:
        """Return which deaths explain an underrun, or which was the latest before it."""
        deaths = [each for each in self.deaths if each.explains(underrun)]
        if deaths:
            return ", ".join(f"within the load of {each.stage}: {each.described(underrun)}" for each in deaths)
        latest = max((each for each in self.deaths if each.at <= underrun.at), key=lambda each: each.at, default=None)
        return "in no load" + (
            "" if latest is None else f"; the latest was that of {latest.stage}: {latest.described(underrun)}"
        )

    def figures(self) -> dict[str, Any]:
        """Return everything, as JSON has it. Times of a clock are seconds since the run began."""
        found = asdict(self)
        for each in (*found["deaths"], *found["asked"]):
            each["at"] -= self.began
        for each, asked in zip(found["asked"], self.asked, strict=True):
            each["underruns"] = [
                {
                    "at": one.at - self.began,
                    "gap_s": one.gap_s,
                    "cause": self.cause(one),
                    "explained": one not in self.unexplained,
                }
                for one in asked.underruns
            ]
        return found


async def ask(user: User, found: Asked) -> None:
    """Ask a question, and hear the answer to its end."""
    spoken = user.microphone.say(say(found.text))
    found.at, before = spoken.begins, user.answer
    try:
        async with asyncio.timeout(ANSWER_S + spoken.ends - spoken.begins):
            await user.wait("response.done")
            while user.answer.status == "cancelled":
                found.cuts += 1
                found.underruns += user.answer.underruns
                before = user.answer
                await user.wait("response.done")
            found.status, found.reason = user.answer.status, user.answer.reason
    except TimeoutError:
        found.reason = f"in {ANSWER_S:g} s"
    finally:
        answer = user.answer
        if answer is not before:
            found.answer, found.first_s, found.sound_s = answer.text, answer.first_s - spoken.ends, answer.heard_s
            found.underruns += answer.underruns
    await asyncio.sleep(max(0.0, user.answer.player.ahead_s(time.monotonic())) + PAUSE_S)


async def converse(server: Server, run: Run, session: int, until: float) -> None:
    """Ask questions in one session until a time. A session that ends before is noted."""
    noise = noise_below(say(QUESTIONS[0]), NOISE_DB[session % len(NOISE_DB)])
    asked = {**config(), "instructions": INSTRUCTIONS, "max_output_tokens": MAX_TOKENS}
    try:
        async with talking(server.client, asked, noise) as user:
            for text in itertools.islice(itertools.cycle(QUESTIONS), 2 * session, None):
                if time.monotonic() >= until:
                    break
                run.asked.append(Asked(session, text))
                await ask(user, run.asked[-1])
                run.errors += user.errors
                user.errors.clear()
    except* SESSION_ERRORS as lost:
        run.lost.append(f"session {session}: {reasons(lost)}")


async def kill(server: Server, run: Run, every_s: float, until: float) -> None:
    """Kill a worker of each stage in turn, until a time, and find out when each stage serves again."""
    async with asyncio.TaskGroup() as tasks:
        for number, stage in enumerate(itertools.cycle(STAGES), 1):
            at = run.began + number * every_s
            if at >= until:
                break
            await asyncio.sleep(at - time.monotonic())
            death = Death(stage, time.monotonic())
            try:
                pid = await server.kill(stage)
            except (LookupError, httpx.HTTPError) as error:
                run.errors.append(f"{stage} was not killed: {error!r}")
                continue
            run.deaths.append(death)
            tasks.create_task(watch(server, death, pid, until + ANSWER_S))


async def watch(server: Server, death: Death, pid: int, until: float) -> None:
    """Wait until the stage serves again, or until a time."""
    while time.monotonic() < until:
        with contextlib.suppress(httpx.HTTPError):  # /health is late; the next poll asks again
            if await server.serves(death.stage, but=pid):
                death.load_s = time.monotonic() - death.at
                return
        await asyncio.sleep(POLL_S)


async def measure(run: Run, *, sessions: int, every_s: float, overrides: Sequence[str]) -> None:
    """Run the sessions for ``run.seconds``, and until each has its last answer. ``run`` has all that has happened."""
    is_deadly, changes = VARIANTS[run.variant]
    for text in QUESTIONS:
        say(text)  # it is kept; made in a session, it would hold up all users
    async with serving((*changes, *overrides)) as server:
        before = os.getloadavg()[0]
        run.began = time.monotonic()
        until = run.began + run.seconds
        try:
            async with asyncio.TaskGroup() as tasks:
                for session in range(sessions):
                    tasks.create_task(converse(server, run, session, until))
                if is_deadly:
                    tasks.create_task(kill(server, run, every_s, until))
        finally:
            run.lasted_s = time.monotonic() - run.began
            run.load = (before, os.getloadavg()[0])
