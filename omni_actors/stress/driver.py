"""Carries out the operations of a schedule on a running system.

Rules
1. One task carries them out in order. A fault is under way when ``do`` returns (the signal is sent a moment later, see
   ``KillHelper``). A task of its own follows it until its stage serves again.
2. A fault is *detected* when the system reports the death, *ready* when a worker of the stage serves again, and
   *recovered* when a request that needs the stage, submitted at that report, is answered.
3. A fault whose stage is hit again before that is *overtaken*: it is counted, and its times are not. A fault that did
   not come *alone* (every stage served, and nothing else happened until it was over) counts only for detection.
4. A request that crashes its engine and is replayed is in force until it ends. The orchestrator may let it wait for
   longer than the patience (``orchestrator.trials``, rule 6), from the first if an equal one has crashed before. Its
   fault is detected at its first death. The run waits for its end after the load has stopped.
5. A fault hangs if what it waits for has not happened ``patience_s`` after it. Each death by a crashing request is
   another fault.
"""

from __future__ import annotations

import signal
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import assert_never

import trio

from omni_actors.cluster.spawner import ClusterSpawner
from omni_actors.orchestrator.trials import CULPRIT_WAIT_S
from omni_actors.stress import judge, schedule
from omni_actors.stress.adapters import switch
from omni_actors.stress.client import LoadClient
from omni_actors.stress.controls import Controls
from omni_actors.stress.faults import KillHelper, RefusingSpawner, Victim, kill_parent
from omni_actors.stress.health_watch import HealthWatch
from omni_actors.stress.judge import ObservedDeath, TrackedRequest, Violation
from omni_actors.stress.node_faults import NodeFaults
from omni_actors.stress.report import Tally, Timing
from omni_actors.stress.workload import Workload
from omni_actors.system import OmniSystem

STARVED_S = 1.0
CRASHES: dict[str, tuple[str, dict[str, object]]] = {
    "raise": ("exception in step", {"raise": "step"}),
    "exit": ("exit in step", {"exit": 3}),
    "hang": ("endless step", {"hang": True}),
}
"""The name of each crash in the table, and the hooks that cause it."""


@dataclass(eq=False)
class _Injection:
    fault: str
    stage: str
    pid: int | None
    """The worker that it hits. None: the one that serves the request that causes it."""
    at: float
    """When it was injected. Times of a signal count from when the kill helper sent it."""
    operation: int
    alone: bool
    timing: Timing = field(default_factory=Timing)
    overtaken: bool = False


class Driver:
    """A system under load and faults. Its tasks run in ``nursery``."""

    def __init__(
        self,
        omni: OmniSystem,
        workload: Workload,
        load: schedule.Load,
        spawner: RefusingSpawner,
        cluster: ClusterSpawner | None,
        kill_helper: KillHelper,
        nursery: trio.Nursery,
        adapters: Sequence[Path],
        controls: Controls,
    ) -> None:
        """adapters: the versions of the workload's LoRA adapter. cluster: the workers' nodes, if there are some."""
        self._workload, self._load, self._nursery = workload, load, nursery
        self._omni, self._adapters, self.controls = omni, adapters, controls
        self.spawner, self._kill_helper = spawner, kill_helper
        self.tally = Tally()
        self.watch = HealthWatch(omni, time.monotonic, self._extend_patience, lambda: self.client.count_promotion())
        self.client = LoadClient(
            omni=omni,
            workload=workload,
            watch=self.watch,
            tally=self.tally,
            row_at=lambda at: self.tally.row(self.fault_at(at), load),
            nursery=nursery,
            controls=controls,
        )
        self.faults: list[tuple[float, str]] = []
        """The faults so far, with their times."""
        self.violations: list[tuple[float, Violation]] = []
        self.killed: set[int] = set()
        """The pids of the workers that were killed."""
        self.requested_deaths: Counter[str] = Counter()
        """The deaths that were caused without naming a pid, by stage."""
        self.node_faults = NodeFaults(
            cluster=cluster,
            kill_helper=kill_helper,
            replicas=lambda: self.watch.replicas,
            inject=self._inject,
            follow=self._follow_soon,
            killed=self.killed,
        )
        self._submitted: list[TrackedRequest] = []
        self._following: list[_Injection] = []
        self._operation = 0
        """The number of the operation that is carried out."""
        self._undisturbed = True
        """Whether every stage served and no fault was in force when the operation began."""
        self._unfollowed = 0
        """Pauses, memory limits and crashing requests that are still in force."""
        self._crashing: Counter[str] = Counter()
        """The crashing requests among them, by stage."""
        self._patient: set[trio.CancelScope] = set()
        nursery.start_soon(self.watch.run)
        for slot in range({"idle": 0, "one": 1, "full": workload.full}[load]):
            nursery.start_soon(self.client.keep_submitting, slot)

    async def do(self, operation: schedule.Operation) -> None:
        self._operation += 1
        self._undisturbed = not (self.watch.unsettled or self._following or self._unfollowed)
        match operation:
            case schedule.Submit(name, on_failure, pace):
                template = self._workload.templates[name]
                self._submitted.append(self.client.submit(template, on_failure, pace_s=pace / 1000))
            case schedule.Abort(index) | schedule.Disconnect(index):
                if self._submitted:
                    end = self.client.abort if isinstance(operation, schedule.Abort) else self.client.drop
                    end(self._submitted[index % len(self._submitted)])
            case schedule.Wait(ms):
                await trio.sleep(ms / 1000)
            case schedule.Settle():
                await self._settle()
            case schedule.SwitchAdapter(version):
                self._nursery.start_soon(switch, self._omni, self._adapters[version % len(self._adapters)])
            case schedule.PauseGeneration() | schedule.Sleep() | schedule.UpdateWeights():
                self.controls.start(operation, self._nursery)
            case schedule.Kill(stages):
                self._kill("SIGKILL" if len(stages) == 1 else "SIGKILL, several at once", *stages)
            case schedule.KillLoading(stage, after):
                self._kill("SIGKILL", stage)
                if await self._next_worker(stage, after / 1000) not in (None, "ready"):
                    self._kill("SIGKILL", stage)
            case schedule.Storm(stage, times):
                for _ in range(times):
                    await self._next_worker(stage, 0)
                    self._kill("restart storm", stage)
            case schedule.Freeze(stage):
                self._kill("SIGSTOP", stage, number=signal.SIGSTOP)
            case schedule.Pause(stage, ms):
                self._nursery.start_soon(self._pause, stage, ms / 1000)
            case schedule.Crash():
                self._crash(operation)
            case schedule.Starve(stage):
                self._nursery.start_soon(self._starve, stage)
            case schedule.Full(stage, times):
                self.spawner.refusals[stage] = times
                self._kill("no memory for rings", stage)
            case schedule.Orphan(loading):
                await self._orphan(loading=loading)
            case schedule.PauseAgent(node, ms):
                self._nursery.start_soon(self._pause_agent, node, ms / 1000)
            case schedule.KillAgent() | schedule.FreezeAgent() | schedule.CutControl() | schedule.CutLinks():
                self.node_faults.hit(operation)
            case _:
                assert_never(operation)

    def fault_at(self, at: float) -> str:
        """The last fault before ``at``, by the clock of the client."""
        return next((fault for when, fault in reversed(self.faults) if when <= at), "(none)")

    def judge_ended(self) -> None:
        """Check what has ended. Every death so far must be known. Keeps only what requests in flight need."""
        self.client.judge_ended()
        following = [injection.at for injection in self._following]
        old = self.watch.forget(min([time.monotonic(), *following, *(each.submitted for each in self.client.open)]))
        unexplained, self.requested_deaths = judge.check_deaths(
            old, self.killed, self.requested_deaths, explanations=self.node_faults.explanations
        )
        self.violations += [(time.monotonic(), violation) for violation in unexplained]
        self.killed -= {death.pid for death in old}

    async def until_settled(self) -> None:
        """Wait until every stage serves or is given up, and no fault is being followed."""
        await self.watch.until(lambda: not self.watch.unsettled)
        while self._following:
            await self.client.ended.park()
        while self.controls.in_force:  # noqa: ASYNC110 - no event reports it
            await trio.sleep(0.01)
        await self.watch.until(lambda: not self.watch.unsettled)

    @contextmanager
    def patience(self) -> Iterator[trio.CancelScope]:
        """Cancel the block after ``patience_s``, counted anew at each death that a crashing request may have caused."""
        with trio.move_on_after(self._workload.patience_s) as scope:
            self._patient.add(scope)
            try:
                yield scope
            finally:
                self._patient.remove(scope)

    def _extend_patience(self, death: ObservedDeath) -> None:
        if self._crashing[death.stage]:
            for scope in self._patient:
                scope.deadline = max(scope.deadline, trio.current_time() + self._workload.patience_s)

    async def _settle(self) -> None:
        with self.patience():
            await self.until_settled()
            for request in self._submitted:
                await self.client.until_ended(request)

    # faults

    def _worker(self, stage: str) -> int | None:
        """The pid of a worker of the stage that is not being killed yet: a standby for each third fault."""
        pids = self.watch.pids(stage, standbys_first=len(self.faults) % 3 == 2)
        return next((pid for pid in pids if pid not in self.killed), None)

    def _victim(self, stage: str) -> Victim:
        """Return a worker of the stage that is not being killed yet. Raises ProcessLookupError if there is none."""
        if pid := self._worker(stage):
            return Victim(pid)
        raise ProcessLookupError(f"stage {stage!r} has no worker")

    async def _next_worker(self, stage: str, after_s: float) -> str | None:
        """Wait for a worker that is not being killed, and ``after_s`` more. Returns its state, if it lives."""
        with trio.move_on_after(self._workload.patience_s):
            while self._worker(stage) is None and stage not in self.watch.given_up:  # noqa: ASYNC110 - no event reports it
                await trio.sleep(0.001)
            await trio.sleep(after_s)
        return self.watch.state_of(self._worker(stage))

    def _inject(self, fault: str, stage: str, pid: int | None = None) -> _Injection:
        injection = _Injection(
            fault=fault, stage=stage, pid=pid, at=time.monotonic(), operation=self._operation, alone=self._undisturbed
        )
        injection.overtaken = pid is None and self._crashing[stage] > 0
        for other in self._following:
            other.overtaken |= other.stage == stage
            other.alone &= other.operation == self._operation
        self.faults.append((injection.at, fault))
        self.tally.row(fault, self._load).faults += 1
        return injection

    def _kill(self, fault: str, *stages: str, number: signal.Signals = signal.SIGKILL) -> None:
        """Send the signal to one worker of each of these stages at once."""
        victims: list[Victim] = []
        injections: list[_Injection] = []
        with ExitStack() as stack:
            for stage in stages:
                with suppress(ProcessLookupError):
                    victim = stack.enter_context(self._victim(stage))
                    loading = fault in ("SIGKILL", "SIGSTOP") and self.watch.state_of(victim.pid) != "ready"
                    self.killed.add(victim.pid)
                    victims.append(victim)
                    injections.append(self._inject(fault + " while loading" * loading, stage, victim.pid))
            order = self._kill_helper.send(number, victims) if victims else None
        for injection in injections:
            self._follow_soon(injection, order)

    async def _pause(self, stage: str, for_s: float) -> None:
        with suppress(ProcessLookupError), self._victim(stage) as victim:
            self._inject("SIGSTOP, then SIGCONT", stage)
            victim.send(signal.SIGSTOP)
            self._unfollowed += 1
            try:
                await trio.sleep(min(for_s, self._workload.pipeline.stages[stage].step_timeout_s / 2))
            finally:
                if victim.pid not in self.killed:  # it may have been stopped for good meanwhile
                    victim.send(signal.SIGCONT)
                self._unfollowed -= 1

    async def _pause_agent(self, node: int, for_s: float) -> None:
        self._unfollowed += 1
        await self.node_faults.pause_agent(node, min(for_s, self._workload.step_timeout_s / 2))
        self._unfollowed -= 1

    def _crash(self, crash: schedule.Crash) -> None:
        stage = crash.stage
        if stage in self.watch.given_up:
            return
        limits = self._workload.pipeline.limits
        self.requested_deaths[stage] += judge.max_deaths_by_one_request(limits, crash.on_failure)
        fault, hooks = CRASHES[crash.how]
        injection = self._inject(fault + (", replayed" if crash.on_failure == "replay" else ""), stage)
        template = self._workload.probe(stage)
        carrier = self.client.submit(template, crash.on_failure, hooks={"stage": stage, **hooks})
        self._nursery.start_soon(self._count_crashing, stage, carrier)
        self._follow_soon(injection, carrier=carrier)

    async def _count_crashing(self, stage: str, carrier: TrackedRequest) -> None:
        self._unfollowed += 1
        self._crashing[stage] += 1
        await self.client.until_ended(carrier)
        self._unfollowed -= 1
        self._crashing[stage] -= 1

    async def _starve(self, stage: str) -> None:
        with suppress(ProcessLookupError), self._victim(stage) as victim:
            self.requested_deaths[stage] += 1
            injection = self._inject("out of memory", stage, victim.pid)
            victim.limit_memory()
            largest = max(self._workload.templates.values(), key=lambda each: stage in each.stages and len(each.stages))
            self.client.submit(largest, "replay")
            self._unfollowed += 1
            with trio.move_on_after(STARVED_S):
                await self.watch.until(lambda: any(death.pid == victim.pid for death in self.watch.deaths))
                self._follow_soon(injection)
            self._unfollowed -= 1
            victim.unlimit_memory()  # it may have needed no more

    async def _orphan(self, *, loading: bool) -> None:
        fault = f"SIGKILL of the parent, {'loading' if loading else 'serving'}"
        injection = self._inject(fault, "")
        took_s, remaining = await kill_parent(self._workload, loading=loading)
        self.tally.row(fault, self._load).timings.append(Timing(detected_s=took_s))
        self.violations += [(injection.at, Violation("leaked", each)) for each in remaining]

    # following faults

    def _follow_soon(
        self, injection: _Injection, order: int | None = None, carrier: TrackedRequest | None = None
    ) -> None:
        """Follow a fault until a request that needs its stage is answered.

        order: the kill helper's number for it. carrier: the request that causes it.
        """
        self._following.append(injection)
        self._nursery.start_soon(self._follow, injection, carrier, order)

    def _death_by(self, injection: _Injection) -> ObservedDeath | None:
        """The death that the fault caused, once it is reported."""
        for death in self.watch.deaths:
            hit = death.stage == injection.stage and death.pid not in self.killed
            if death.at >= injection.at and (hit if injection.pid is None else death.pid == injection.pid):
                return death
        return None

    async def _follow(self, injection: _Injection, carrier: TrackedRequest | None, order: int | None) -> None:
        timing, is_hit = injection.timing, False
        with self.patience() as patience:
            patience.deadline += CULPRIT_WAIT_S if carrier is not None else 0.0  # rule 4
            is_hit = await self._time(injection, carrier, order)
        self._forget(injection)
        if patience.cancelled_caught:
            missing = "detected" if timing.detected_s is None else "recovered"
            what = f"{injection.fault} of {injection.stage!r}: not {missing}"
            self.violations.append((injection.at, Violation("hung", what)))
        elif is_hit and not injection.overtaken:
            if not injection.alone:
                timing.ready_s = timing.recovered_s = timing.load_s = None
            self.tally.row(injection.fault, self._load).timings.append(timing)

    async def _time(self, injection: _Injection, carrier: TrackedRequest | None, order: int | None) -> bool:
        """Wait until a fault is over, and fill its times. Return whether the fault caused a death."""
        timing, stage, watch = injection.timing, injection.stage, self.watch
        if carrier is None:
            slept = partial(self.controls.has_slept, stage, injection.at)
            await watch.until(lambda: self._death_by(injection) is not None or slept())
        else:
            async with trio.open_nursery() as waiting:
                waiting.start_soon(self._until_ended, carrier, waiting.cancel_scope)
                await watch.until(lambda: self._death_by(injection) is not None)
                waiting.cancel_scope.cancel()
        lost = self._death_by(injection)
        hit_at = injection.at if order is None else await self._kill_helper.done_at(order)
        if lost is None or lost.at < hit_at:  # the carrier was aborted, or something else ended the worker
            return False
        timing.detected_s = lost.at - hit_at
        probe = self.client.submit(self._workload.probe(stage), "replay")
        await watch.until(
            lambda: watch.is_given_up(stage, lost.replica) or watch.serving_since(stage, lost.at) is not None
        )
        serving = watch.serving_since(stage, lost.at)
        if serving:
            timing.ready_s, timing.load_s = serving.at - hit_at, serving.load_s
        await self.client.until_ended(probe)
        if serving and probe.outcome == "completed":
            timing.recovered_s = time.monotonic() - hit_at
        return True

    async def _until_ended(self, request: TrackedRequest, waiting: trio.CancelScope) -> None:
        await self.client.until_ended(request)
        waiting.cancel()

    def _forget(self, injection: _Injection) -> None:
        self._following.remove(injection)
        self.client.ended.unpark_all()
