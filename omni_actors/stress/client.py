"""Submits, reads, drops and aborts the requests of a run, and checks their outcomes.

Rules
1. Every request is on record from its submission until it is checked: a completed one at once, others when the deaths
   until then are known. Nothing of it is kept afterwards, so that a long run stays small.
2. After the end, the client reads once more: a request must not have a second outcome.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping
from typing import Any

import trio

from omni_actors.errors import RequestError
from omni_actors.generation import Generation
from omni_actors.stress import judge
from omni_actors.stress.health_watch import HealthWatch
from omni_actors.stress.oracle import Answer
from omni_actors.stress.report import Tally
from omni_actors.stress.schedule import OnFailure
from omni_actors.stress.workload import Template, Workload
from omni_actors.system import OmniSystem

REFUSED_S = 0.01


class Client:
    """The client of one system. Its tasks run in ``nursery``."""

    def __init__(
        self, omni: OmniSystem, workload: Workload, watch: HealthWatch, tally: Tally, nursery: trio.Nursery
    ) -> None:
        self._omni, self._workload, self._watch, self._tally, self._nursery = omni, workload, watch, tally, nursery
        self._names = itertools.count()
        self._records: list[judge.TrackedRequest] = []
        self._open: dict[judge.TrackedRequest, trio.CancelScope] = {}
        self._stopping = False
        self.violations: list[tuple[float, judge.Violation]] = []
        """The violations of checked requests, with the times at which these ended."""
        self.outputs = 0
        """Outputs read so far, of all requests."""
        self.ended = trio.lowlevel.ParkingLot()
        """Woken whenever a request ends."""

    @property
    def open(self) -> list[judge.TrackedRequest]:
        return list(self._open)

    def submit(
        self, template: Template, on_failure: OnFailure, *, pace_s: float = 0.0, hooks: Mapping[str, Any] | None = None
    ) -> judge.TrackedRequest:
        """Submit a request, and read it in a task. pace_s: between outputs. hooks: failures asked of echo engines."""
        answer = Answer(self._workload.oracle[template.name])
        asked = judge.TrackedRequest(
            name=f"stress-{next(self._names)}",
            template=template,
            answer=answer,
            on_failure=on_failure,
            submitted=time.monotonic(),
            asks_for_failure=hooks is not None,
        )
        self._records.append(asked)
        inputs = template.inputs if hooks is None else template.with_hooks(hooks)
        try:
            generation = self._omni.submit(
                inputs, template.modalities, request_id=asked.name, on_failure=on_failure, **template.params
            )
        except RequestError as error:
            self._end(asked, "failed", error)
        else:
            self._open[asked] = trio.CancelScope()
            self._nursery.start_soon(self._read, asked, generation, pace_s)
        return asked

    def abort(self, asked: judge.TrackedRequest) -> None:
        asked.aborted = True
        self._omni.abort(asked.name)

    def drop(self, asked: judge.TrackedRequest) -> None:
        """Stop reading a request. Does nothing after its end."""
        if scope := self._open.get(asked):
            scope.cancel()

    async def until_ended(self, asked: judge.TrackedRequest) -> None:
        while asked in self._open:
            await self.ended.park()

    async def keep_submitting(self, slot: int) -> None:
        """Send one request after the other, through all of the workload, until ``stop``."""
        templates = list(self._workload.templates.values())
        for number in itertools.count(slot):
            if self._stopping:
                return
            asked = self.submit(templates[number % len(templates)], "fail" if number % 4 == 3 else "replay")
            await self.until_ended(asked)
            if asked.outcome != "completed":
                await trio.sleep(REFUSED_S)  # it may have been refused at once

    def stop(self) -> None:
        """Let ``keep_submitting`` end."""
        self._stopping = True

    def judge_ended(self) -> None:
        """Check the requests that did not complete. Every death so far must be known."""
        for asked in self._records:
            if asked not in self._open:
                self._judge(asked)
        self._records = [asked for asked in self._records if asked in self._open]

    async def _read(self, asked: judge.TrackedRequest, generation: Generation, pace_s: float) -> None:
        with self._open[asked]:
            error = await read_to_the_end(asked, generation, pace_s, self._count)
            self._end(asked, "failed" if error else "completed", error)
        if asked.outcome == "open":
            self._end(asked, "dropped", None)

    def _count(self) -> None:
        self.outputs += 1

    def _end(self, asked: judge.TrackedRequest, outcome: judge.Outcome, error: RequestError | None) -> None:
        asked.outcome, asked.error, asked.ended = outcome, error, time.monotonic()
        self._open.pop(asked, None)
        self._tally.requests[type(error).__name__ if error else outcome] += 1
        if outcome == "completed":
            self._judge(asked)
            self._records.remove(asked)
        if error is not None:
            error.with_traceback(None)  # its frames hold outputs
        self.ended.unpark_all()

    def _judge(self, asked: judge.TrackedRequest) -> None:
        rules = judge.Rules(self._workload.pipeline.limits.replays, self._workload.replayed)
        if violation := judge.check_request(asked, self._watch.deaths, self._watch.given_up, rules):
            self.violations.append((asked.ended or time.monotonic(), violation))


async def read_to_the_end(
    asked: judge.TrackedRequest, generation: Generation, pace_s: float, on_output: Callable[[], None] = lambda: None
) -> RequestError | None:
    """Record an answer to its end, and read once more (rule 2). Returns the error that ended it, if any."""
    error: RequestError | None = None
    try:
        async for output in generation:
            asked.answer.add(output)
            on_output()
            if pace_s:
                await trio.sleep(pace_s)
    except RequestError as failure:
        error = failure
    asked.second_outcome = await _second_outcome(generation, error)
    return error


async def _second_outcome(generation: Generation, error: RequestError | None) -> str | None:
    """What reading once more gives, if it is not the same end."""
    try:
        output = await anext(generation)
    except StopAsyncIteration:
        return "completion" if error else None
    except RequestError as again:
        return None if again is error else f"{type(again).__name__}: {again}"
    return f"an output of {output.stage!r}"
