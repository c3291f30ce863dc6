"""Submits, reads, drops and aborts the requests of a run, and checks their outcomes.

Rules
1. Every request is on record from its submission until it is checked: a completed one at once, others when the deaths
   until then are known. Nothing of it is kept afterwards, so that a long run stays small.
2. A completed request counts as *resumed* if a resumable stage of it started again after a death, and as *repeated* if
   another stage did; so it may count as both. It counts at the last fault before the latest death that it met.
3. After the end, the client reads once more: a request must not have a second outcome.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

import trio

from omni_actors.errors import RequestError
from omni_actors.generation import Generation
from omni_actors.orchestrator.request import Request
from omni_actors.stress import judge
from omni_actors.stress.adapters import oracle_name
from omni_actors.stress.controls import Controls
from omni_actors.stress.health_watch import HealthWatch
from omni_actors.stress.oracle import ExpectedAnswer, Versions
from omni_actors.stress.report import Row, Tally
from omni_actors.stress.schedule import OnFailure
from omni_actors.stress.workload import Template, Workload
from omni_actors.system import OmniSystem

RETRY_DELAY_S = 0.01
Tracked = TypeVar("Tracked", bound=judge.TrackedRequest)


class Client(Generic[Tracked]):
    """Submits requests and reads them in tasks of ``nursery``.

    now: the clock of their times. row_at: returns the row of the last fault before a time on this clock.

    ``omni``, ``watch`` and ``nursery`` are set once the system is open.
    """

    omni: OmniSystem
    watch: HealthWatch
    nursery: trio.Nursery

    def __init__(
        self, workload: Workload, tally: Tally, now: Callable[[], float], row_at: Callable[[float], Row]
    ) -> None:
        self._workload, self._tally, self._now, self._row_at = workload, tally, now, row_at
        self.requests: list[Tracked] = []
        """The requests on record."""
        self.open: dict[Tracked, trio.CancelScope] = {}
        self.outputs = 0
        """Outputs read so far, of all requests."""

    def abort(self, request: Tracked) -> None:
        request.aborted = True
        self.omni.abort(request.name)

    def drop(self, request: Tracked) -> None:
        """Stop reading a request. Does nothing after its end."""
        if scope := self.open.get(request):
            scope.cancel()

    def _submit(self, request: Tracked) -> None:
        self.requests.append(request)
        template = request.template
        try:
            generation = self.omni.submit(
                template.inputs if request.hooks is None else template.with_hooks(request.hooks),
                template.modalities,
                request_id=request.name,
                deadline_s=request.deadline_s,
                on_failure=request.on_failure,
                **template.params,
            )
        except RequestError as error:
            self._end(request, "failed", error)
        else:
            if request.relays:
                generation.stream.relay(whole=False)
            self.open[request] = trio.CancelScope()
            self.nursery.start_soon(self._read, request, generation)

    async def _read(self, request: Tracked, generation: Generation) -> None:
        with self.open[request]:
            error: RequestError | None = None
            try:
                async for output in generation:
                    request.answer.add(output)
                    request.versions.add(output)
                    self.outputs += 1
                    if request.pace_s:
                        await trio.sleep(request.pace_s)
            except RequestError as failure:
                error = failure
            request.second_outcome = await _second_outcome(generation, error)
            if error is None:
                self._count_restarted(generation.stream.request)
            self._end(request, "failed" if error else "completed", error)
        if request.outcome == "open":
            self._end(request, "dropped", None)

    def _count_restarted(self, request: Request) -> None:
        """Count a completed request as resumed and as repeated."""
        if stages := request.restarted_stages:
            row = self._row_at(self._now() - (trio.current_time() - request.deaths.losses[-1].noticed))
            resumed = {stage for stage in stages if self._workload.pipeline.resumable(stage)}
            row.resumed += bool(resumed)
            row.repeated += resumed != stages

    def count_promotion(self) -> None:
        """Count a standby that took over now."""
        self._row_at(self._now()).promotions += 1

    def _end(self, request: Tracked, outcome: judge.Outcome, error: RequestError | None) -> None:
        request.outcome, request.error, request.ended = outcome, error, self._now()
        self.open.pop(request, None)
        self._tally.requests[request.ending] += 1
        if error is not None:
            error.with_traceback(None)  # its frames refer to outputs


class LoadClient(Client[judge.TrackedRequest]):
    """The client of a system with real workers. Keeps requests in flight, and judges each one that has ended."""

    def __init__(
        self,
        omni: OmniSystem,
        workload: Workload,
        watch: HealthWatch,
        tally: Tally,
        row_at: Callable[[float], Row],
        nursery: trio.Nursery,
        controls: Controls,
    ) -> None:
        super().__init__(workload, tally, time.monotonic, row_at)
        self.omni, self.watch, self.nursery, self._controls = omni, watch, nursery, controls
        self._numbers = itertools.count()
        self.stopping = False
        """Set it to let ``keep_submitting`` end."""
        self.violations: list[tuple[float, judge.Violation]] = []
        """The violations of checked requests, with the times at which these ended."""
        self.ended = trio.lowlevel.ParkingLot()
        """Woken whenever a request ends."""

    def submit(
        self, template: Template, on_failure: OnFailure, *, pace_s: float = 0.0, hooks: Mapping[str, Any] | None = None
    ) -> judge.TrackedRequest:
        """Submit a request, and read it in a task. pace_s: between outputs. hooks: failures asked of echo engines."""
        request = judge.TrackedRequest(
            name=f"stress-{next(self._numbers)}",
            template=template,
            answer=ExpectedAnswer(self._workload.oracle[oracle_name(self.omni, template)]),
            on_failure=on_failure,
            submitted=time.monotonic(),
            pace_s=pace_s,
            hooks=hooks,
            versions=Versions(self._controls.established, self._workload.hooks),
        )
        self._submit(request)
        return request

    async def until_ended(self, request: judge.TrackedRequest) -> None:
        while request in self.open:
            await self.ended.park()

    async def keep_submitting(self, slot: int) -> None:
        """Send one request after the other, through all of the workload, until ``stopping``."""
        templates = list(self._workload.templates.values())
        numbers = itertools.count(slot)
        while not self.stopping:
            number = next(numbers)
            request = self.submit(templates[number % len(templates)], "fail" if number % 4 == 3 else "replay")
            await self.until_ended(request)
            if request.outcome != "completed":
                await trio.sleep(RETRY_DELAY_S)  # it may have been refused at once

    def judge_ended(self) -> None:
        """Check the requests that did not complete. Every death so far must be known."""
        for request in self.requests:
            if request not in self.open:
                self._judge(request)
        self.requests = list(self.open)

    def _end(self, request: judge.TrackedRequest, outcome: judge.Outcome, error: RequestError | None) -> None:
        super()._end(request, outcome, error)
        if outcome == "completed":
            self._judge(request)
            self.requests.remove(request)
        self.ended.unpark_all()

    def _judge(self, request: judge.TrackedRequest) -> None:
        limits, closures = self._workload.pipeline.limits, self._controls.closures
        rules = judge.Rules(limits.replays, self._workload.replayed, closures)
        if violation := judge.check_request(request, self.watch.deaths, self.watch.ever_given_up, rules):
            self.violations.append((request.ended or time.monotonic(), violation))


async def _second_outcome(generation: Generation, error: RequestError | None) -> str | None:
    """Read once more. Return what that gives, if it is not the same end."""
    try:
        output = await anext(generation)
    except StopAsyncIteration:
        return "completion" if error else None
    except RequestError as again:
        is_same = type(again) is type(error) and str(again) == str(error)
        return None if is_same else f"{type(again).__name__}: {again}"
    return f"an output of {output.stage!r}"
