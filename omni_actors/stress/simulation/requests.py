"""Submits the requests of a simulated schedule, reads their outputs, and checks their outcomes."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Set
from dataclasses import dataclass
from typing import Any

import trio

from omni_actors.errors import (
    DeadlineExceeded,
    InvalidRequest,
    Overloaded,
    RequestError,
    SlowConsumer,
    StageUnavailable,
)
from omni_actors.stress import judge
from omni_actors.stress.client import Client
from omni_actors.stress.oracle import ExpectedAnswer
from omni_actors.stress.simulation.cluster import SimulatedCluster
from omni_actors.stress.simulation.journal import Journal
from omni_actors.stress.simulation.spawner import SimulatedSpawner
from omni_actors.stress.workload import Template, Workload

EPSILON_S = 1e-6
NO_EVICTION_BYTES = 1_000_000
"""With a ``retain_bytes`` of at least this, no schedule fills it, so replays cannot fail for it."""


@dataclass(eq=False)
class SimulatedRequest(judge.TrackedRequest):
    """A request of a schedule. Its times are virtual."""

    system_was_full: bool = False
    """``limits.max_requests`` were in flight when it was submitted."""
    congested: Set[str] = frozenset()
    """Stages that did not keep up with their control messages when it was submitted."""
    invalid: bool = False
    """It asks an engine to refuse it."""


class SimulatedClient(Client[SimulatedRequest]):
    """The client of one schedule. It judges all requests together, at the end."""

    def __init__(
        self,
        draw: random.Random,
        workload: Workload,
        spawner: SimulatedSpawner | SimulatedCluster,
        journal: Journal,
    ) -> None:
        super().__init__(workload, journal.tally, trio.current_time, row_at=lambda at: journal.row)
        self._draw, self._spawner, self._journal = draw, spawner, journal
        self.closures = judge.ClosedPeriods()
        self._poison: dict[SimulatedRequest, str] = {}
        """The poison requests, and the stages whose engines they break."""

    # requests that the schedule draws

    def submit_any(self) -> None:
        self._submit_template("request", self._any_template())

    def submit_slow_reader(self) -> None:
        self._journal.injected("slow reader")
        self._submit_template("slow reader", self._any_template(), pace_s=self._draw.choice((0.01, 0.3, 1.0)))

    def submit_with_deadline(self) -> None:
        self._journal.injected("deadline")
        self._submit_template("deadline", self._any_template(), deadline_s=self._draw.choice((0.0, 0.01, 0.1, 1.0)))

    def submit_too_many(self) -> None:
        self._journal.injected("overload")
        for _ in range(self._workload.pipeline.limits.max_requests + 1):
            self.submit_any()

    def submit_poison(self) -> None:
        """A request that makes an engine raise each time it gets there."""
        self._journal.injected("request that breaks its engine")
        stage = self._submit_with_hook("poison", "raise")
        self._poison[self.requests[-1]] = stage

    def submit_invalid(self) -> None:
        self._journal.injected("request that its engine refuses")
        self._submit_with_hook("refused", "invalid", invalid=True)

    def _submit_with_hook(self, what: str, hook: str, **more: Any) -> str:
        """Submit a request that makes one engine fail. Returns the engine's stage."""
        template = self._any_template()
        stage = self._draw.choice(template.stages)
        self._submit_template(what, template, hooks={"stage": stage, hook: self._draw.choice(("feed", "step"))}, **more)
        return stage

    def abort_any(self) -> None:
        if self.open:
            self._journal.injected("abort")
            request = self._draw.choice(list(self.open))
            self._journal.note(f"{request.name} is aborted")
            self.abort(request)

    def disconnect_any(self) -> None:
        if self.open:
            self._journal.injected("disconnect")
            request = self._draw.choice(list(self.open))
            self._journal.note(f"{request.name} is dropped")
            self.drop(request)

    def submit_probes(self) -> None:
        """The cheapest request of each stage."""
        for stage in self._workload.stages:
            self._submit_template("probe", self._workload.probe(stage))

    def _any_template(self) -> Template:
        return self._draw.choice(list(self._workload.templates.values()))

    def _submit_template(self, what: str, template: Template, **more: Any) -> None:
        """Submit a request. what: its name in the log. more: fields of ``SimulatedRequest``."""
        number = len(self.requests)
        request = SimulatedRequest(
            name=f"r{number}",
            template=template,
            answer=ExpectedAnswer(self._workload.oracle[template.name]),
            on_failure=self._draw.choice(("replay", "replay", "fail")) if what != "probe" else "replay",
            submitted=trio.current_time(),
            relays="pace_s" in more or number % 2 == 0,
            system_was_full=self.omni.in_flight >= self._workload.pipeline.limits.max_requests,
            congested=self._spawner.congested,
            **more,
        )
        self._journal.note(f"{request.name} is submitted: {what}, {template.name}, {request.on_failure}, {more}")
        self._submit(request)

    def _end(self, request: SimulatedRequest, outcome: judge.Outcome, error: RequestError | None) -> None:
        super()._end(request, outcome, error)
        if isinstance(error, StageUnavailable):
            self.watch.look()  # a schedule may end at this moment
        self._journal.note(f"{request.name} is over: {request.ending}")

    # what their outcomes must be

    def requested_deaths(self, injected: Set[int | None]) -> Counter[str]:
        """Return the most deaths per stage that poison requests may have caused. injected: pids of other deaths."""
        requested: Counter[str] = Counter()
        for request, stage in self._poison.items():
            route, since = request.template.stages, request.submitted
            others = [death for death in self.watch.deaths if death.pid in injected and death.at >= since]
            stopped = [worker for worker in self._spawner.workers if worker.rested_at >= since]
            disturbances = sum(death.stage in route for death in others)
            disturbances += sum(worker.address.stage in route for worker in stopped)
            limits = self._workload.pipeline.limits
            requested[stage] += judge.max_deaths_by_one_request(limits, request.on_failure, disturbances)
        return requested

    def check_outcomes(self) -> None:
        for request in self.requests:
            if found := self._violation(request):
                self._journal.violated(found.kind, found.what)

    def _violation(self, request: SimulatedRequest) -> judge.Violation | None:
        late_s = request.ended - request.submitted - (request.deadline_s if request.deadline_s is not None else 1e9)
        if self._is_expected_error(request, late_s):
            differs = request.answer.damage(complete=False)
            found = judge.Violation(differs[0], f"{request.name}: {differs[1]}") if differs else None
        else:
            limits = self._workload.pipeline.limits
            replays = limits.replays if limits.retain_bytes >= NO_EVICTION_BYTES else 0
            rules = judge.Rules(replays, self._workload.replayed, self.closures)
            found = judge.check_request(request, self.watch.deaths, self.watch.ever_given_up, rules)
        if found is None and not request.pace_s and late_s > EPSILON_S:
            found = judge.Violation("hung", f"{request.name} ended {late_s:g} s after its deadline")
        if found is None and request.system_was_full and request.outcome != "failed" and not self._made_room(request):
            found = judge.Violation("disturbed", f"{request.name} was admitted past limits.max_requests")
        return found

    def _is_expected_error(self, request: SimulatedRequest, late_s: float) -> bool:
        """Whether the schedule itself explains the error."""
        match request.error:
            case DeadlineExceeded():
                return late_s >= -EPSILON_S
            case Overloaded(stage=None):
                return request.system_was_full
            case Overloaded(stage=stage):
                return stage in request.congested
            case SlowConsumer():
                return request.pace_s > 0
            case InvalidRequest():
                return request.invalid
            case _:
                return False

    def _made_room(self, request: SimulatedRequest) -> bool:
        """Whether a slow reader's request may have been ended for this one."""
        return any(
            isinstance(other.error, SlowConsumer) and other.submitted <= request.submitted <= other.ended
            for other in self.requests
        )
