"""Submits the requests of a simulated schedule, reads their outputs, and checks their outcomes."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Set
from dataclasses import dataclass
from typing import Any

import trio

from omni_actors.errors import DeadlineExceeded, InvalidRequest, Overloaded, RequestError, SlowConsumer
from omni_actors.generation import Generation
from omni_actors.stress import judge
from omni_actors.stress.client import read_to_the_end
from omni_actors.stress.oracle import Answer
from omni_actors.stress.simulation.journal import Journal
from omni_actors.stress.simulation.spawner import SimulatedSpawner
from omni_actors.stress.workload import Workload
from omni_actors.system import OmniSystem

EPSILON_S = 1e-6
NO_EVICTION_BYTES = 1_000_000
"""With a ``retain_bytes`` of at least this, no schedule fills it, so replays cannot fail for it."""


@dataclass(eq=False)
class SimulatedRequest(judge.TrackedRequest):
    """A request of a schedule. Its times are virtual."""

    deadline_s: float | None = None
    pace_s: float = 0.0
    system_was_full: bool = False
    """``limits.max_requests`` were in flight when it was submitted."""
    congested: Set[str] = frozenset()
    """Stages that did not keep up with their control messages when it was submitted."""
    invalid: bool = False
    """It asks an engine to refuse it."""


class SimulatedClient:
    """The client of one schedule. ``omni`` and ``nursery`` are set once the system is open."""

    omni: OmniSystem
    nursery: trio.Nursery

    def __init__(self, draw: random.Random, workload: Workload, spawner: SimulatedSpawner, journal: Journal) -> None:
        self._draw, self._workload, self._spawner, self._journal = draw, workload, spawner, journal
        self.requests: list[SimulatedRequest] = []
        self.open: dict[SimulatedRequest, trio.CancelScope] = {}
        self.requested_deaths: Counter[str] = Counter()
        """Deaths per stage that poison requests may cause."""

    # requests that the schedule draws

    def submit_any(self) -> None:
        self._submit("request", self._any_template())

    def submit_slow_reader(self) -> None:
        self._journal.injected("slow reader")
        self._submit("slow reader", self._any_template(), pace_s=self._draw.choice((0.01, 0.3, 1.0)))

    def submit_with_deadline(self) -> None:
        self._journal.injected("deadline")
        self._submit("deadline", self._any_template(), deadline_s=self._draw.choice((0.0, 0.01, 0.1, 1.0)))

    def submit_too_many(self) -> None:
        self._journal.injected("overload")
        for _ in range(self._workload.pipeline.limits.max_requests + 1):
            self.submit_any()

    def submit_poison(self) -> None:
        """A request that makes an engine raise each time it gets there."""
        name = self._any_template()
        stage = self._draw.choice(self._workload.templates[name].stages)
        self._journal.injected("request that breaks its engine")
        self.requested_deaths[stage] += judge.max_deaths_by_one_request(self._workload.pipeline.limits)
        self._submit("poison", name, hooks={"stage": stage, "raise": self._draw.choice(("feed", "step"))})

    def submit_invalid(self) -> None:
        name = self._any_template()
        stage = self._draw.choice(self._workload.templates[name].stages)
        self._journal.injected("request that its engine refuses")
        hooks = {"stage": stage, "invalid": self._draw.choice(("feed", "step"))}
        self._submit("refused", name, hooks=hooks, invalid=True)

    def abort_any(self) -> None:
        if self.open:
            self._journal.injected("abort")
            request = self._draw.choice(list(self.open))
            request.aborted = True
            self._journal.note(f"{request.name} is aborted")
            self.omni.abort(request.name)

    def disconnect_any(self) -> None:
        if self.open:
            self._journal.injected("disconnect")
            request = self._draw.choice(list(self.open))
            self._journal.note(f"{request.name} is dropped")
            self.open[request].cancel()

    def submit_probes(self) -> None:
        """The cheapest request of each stage."""
        for stage in self._workload.stages:
            self._submit("probe", self._workload.probe(stage).name)

    def _any_template(self) -> str:
        return self._draw.choice(list(self._workload.templates))

    def _submit(self, what: str, name: str, **more: Any) -> None:
        template = self._workload.templates[name]
        hooks = more.pop("hooks", None)
        request = SimulatedRequest(
            name=f"r{len(self.requests)}",
            template=template,
            answer=Answer(self._workload.oracle[name]),
            on_failure=self._draw.choice(("replay", "replay", "fail")) if what != "probe" else "replay",
            submitted=trio.current_time(),
            asks_for_failure=hooks is not None,
            system_was_full=self.omni.in_flight >= self._workload.pipeline.limits.max_requests,
            congested={worker.address.stage for worker in self._spawner.living.values() if worker.congested},
            **more,
        )
        self.requests.append(request)
        self._journal.note(f"{request.name} is submitted: {what}, {name}, {request.on_failure}, {more}, {hooks}")
        try:
            generation = self.omni.submit(
                template.inputs if hooks is None else template.with_hooks(hooks),
                template.modalities,
                request_id=request.name,
                on_failure=request.on_failure,
                deadline_s=request.deadline_s,
            )
        except RequestError as error:
            self._end(request, "failed", error)
        else:
            if request.pace_s or len(self.requests) % 2:
                generation.stream.hold(whole=False)  # as an HTTP connection does, so that its stages may be paused
            self.open[request] = trio.CancelScope()
            self.nursery.start_soon(self._read, request, generation)

    async def _read(self, request: SimulatedRequest, generation: Generation) -> None:
        with self.open[request]:
            error = await read_to_the_end(request, generation, request.pace_s)
            self._end(request, "failed" if error else "completed", error)
        if request.outcome == "open":
            self._end(request, "dropped", None)

    def _end(self, request: SimulatedRequest, outcome: judge.Outcome, error: RequestError | None) -> None:
        request.outcome, request.error, request.ended = outcome, error, trio.current_time()
        self.open.pop(request, None)
        how = type(error).__name__ if error else outcome
        self._journal.tally.requests[how] += 1
        self._journal.note(f"{request.name} is over: {how}")

    # what their outcomes must be

    def check_outcomes(self, deaths: list[judge.ObservedDeath], given_up: Set[str]) -> None:
        for request in self.requests:
            if found := self._violation(request, deaths, given_up):
                self._journal.violated(found.kind, found.what)

    def _violation(
        self, request: SimulatedRequest, deaths: list[judge.ObservedDeath], given_up: Set[str]
    ) -> judge.Violation | None:
        late_s = request.ended - request.submitted - (request.deadline_s if request.deadline_s is not None else 1e9)
        if self._is_expected_error(request, late_s):
            differs = request.answer.damage_so_far()
            found = judge.Violation(differs[0], f"{request.name}: {differs[1]}") if differs else None
        else:
            limits = self._workload.pipeline.limits
            replays = limits.replays if limits.retain_bytes >= NO_EVICTION_BYTES else 0
            found = judge.check_request(request, deaths, given_up, judge.Rules(replays, self._workload.replayed))
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
