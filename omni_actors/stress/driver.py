"""Carries out the operations of a schedule on a running system.

Rules
1. One task carries them out in order. A fault is under way when ``do`` returns (the signal is sent a moment later, see
   ``KillHelper``). A task of its own follows it until its stage serves again.
2. A fault is *detected* when the system reports the death, *ready* when a worker of the stage serves again, and
   *recovered* when a request that needs the stage, submitted at that report, is answered.
3. A fault whose stage is hit again before that is *overtaken*: it is counted, and its times are not. A fault that did
   not come *alone* (every stage served, and nothing else happened until it was over) counts only for detection.
"""

from __future__ import annotations

import functools
import signal
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import assert_never

import trio

from omni_actors.stress import judge, schedule
from omni_actors.stress.client import Client
from omni_actors.stress.faults import KillHelper, RefusingSpawner, Victim, kill_parent
from omni_actors.stress.health_watch import HealthWatch
from omni_actors.stress.judge import ObservedDeath, TrackedRequest, Violation
from omni_actors.stress.report import Tally, Timing
from omni_actors.stress.workload import Workload
from omni_actors.system import OmniSystem

STARVED_S = 1.0
HOOKS: dict[str, dict[str, object]] = {"raise": {"raise": "step"}, "exit": {"exit": 3}, "hang": {"hang": True}}
CRASHES = {"raise": "exception in step", "exit": "exit in step", "hang": "endless step"}


@dataclass(eq=False)
class _Injection:
    fault: str
    stage: str
    at: float
    """When it was injected. Times count from ``hit``: for signals, when the kill helper sent them."""
    operation: int
    alone: bool
    hit: float
    order: int | None = None
    """The kill helper's number for it."""
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
        kill_helper: KillHelper,
        nursery: trio.Nursery,
    ) -> None:
        self._workload, self._load, self._nursery = workload, load, nursery
        self._spawner, self._kill_helper = spawner, kill_helper
        self.tally = Tally()
        self.watch = HealthWatch(omni)
        self.client = Client(omni=omni, workload=workload, watch=self.watch, tally=self.tally, nursery=nursery)
        self.faults: list[tuple[float, str]] = []
        """The faults so far, with their times."""
        self.violations: list[tuple[float, Violation]] = []
        self.killed: set[int] = set()
        """pids."""
        self.asked_for: Counter[str] = Counter()
        """By stage: deaths that were caused without naming a pid."""
        self._submitted: list[TrackedRequest] = []
        self._following: list[_Injection] = []
        self._operation = 0
        self._quiet = True
        self._unfollowed = 0
        """Pauses and memory limits that are still in force."""
        nursery.start_soon(self.watch.run)
        for slot in range({"idle": 0, "one": 1, "full": workload.full}[load]):
            nursery.start_soon(self.client.keep_submitting, slot)

    async def do(self, operation: schedule.Operation) -> None:
        self._operation += 1
        self._quiet = self.watch.settled and not self._following and not self._unfollowed
        match operation:
            case schedule.Submit(name, on_failure, pace):
                template = self._workload.templates[name]
                self._submitted.append(self.client.submit(template, on_failure, pace_s=pace / 1000))
            case schedule.Abort(index):
                for asked in self._submitted[index % max(1, len(self._submitted)) :][:1]:
                    self.client.abort(asked)
            case schedule.Disconnect(index):
                for asked in self._submitted[index % max(1, len(self._submitted)) :][:1]:
                    self.client.drop(asked)
            case schedule.Wait(ms):
                await trio.sleep(ms / 1000)
            case schedule.Settle():
                await self._settle()
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
                self._spawner.refusals[stage] = times
                self._kill("no memory for rings", stage)
            case schedule.Orphan(loading):
                await self._orphan(loading=loading)
            case _:
                assert_never(operation)

    def judge_ended(self) -> None:
        """Check what has ended. Every death so far must be known. Keeps only what requests in flight need."""
        self.client.judge_ended()
        following = [injection.at for injection in self._following]
        old = self.watch.forget(min([time.monotonic(), *following, *(asked.submitted for asked in self.client.open)]))
        unexplained, self.asked_for = judge.check_deaths(old, self.killed, self.asked_for)
        self.violations += [(time.monotonic(), violation) for violation in unexplained]
        self.killed -= {death.pid for death in old}

    @property
    def refused(self) -> list[tuple[str, str]]:
        """Producer and consumer of each ring that was refused."""
        return self._spawner.refused

    async def until_quiet(self) -> None:
        """Wait until every stage serves or is given up, and no fault is being followed."""
        await self.watch.until(lambda: self.watch.settled)
        while self._following:
            await self.client.ended.park()

    async def _settle(self) -> None:
        with trio.move_on_after(self._workload.patience_s):
            await self.until_quiet()
            for asked in self._submitted:
                await self.client.until_ended(asked)

    # faults

    def _worker(self, stage: str) -> int | None:
        """The pid of a worker of the stage that is not being killed yet."""
        pids = (each.pid for each in self.watch.health.stages[stage] if each.state != "failed")
        return next((pid for pid in pids if pid and pid not in self.killed), None)

    async def _next_worker(self, stage: str, after_s: float) -> str | None:
        """Wait for a worker that is not being killed, and ``after_s`` more. Returns its state, if it lives."""
        with trio.move_on_after(self._workload.patience_s):
            while self._worker(stage) is None and stage not in self.watch.given_up:  # noqa: ASYNC110 - no event reports it
                await trio.sleep(0.001)
            await trio.sleep(after_s)
        return self._state_of(self._worker(stage))

    def _state_of(self, pid: int | None) -> str | None:
        replicas = (each for stage in self.watch.health.stages.values() for each in stage)
        return next((each.state for each in replicas if pid and each.pid == pid), None)

    def _inject(self, fault: str, stage: str) -> _Injection:
        now = time.monotonic()
        injection = _Injection(fault=fault, stage=stage, at=now, operation=self._operation, alone=self._quiet, hit=now)
        for other in self._following:
            other.overtaken |= other.stage == stage
            other.alone &= other.operation == self._operation
        self.faults.append((injection.at, fault))
        self.tally.row(fault, self._load).faults += 1
        return injection

    def _kill(self, fault: str, *stages: str, number: signal.Signals = signal.SIGKILL) -> None:
        """Send the signal to one worker of each of these stages at once."""
        hit: list[tuple[Victim, _Injection]] = []
        with ExitStack() as held:
            for stage in stages:
                with suppress(ProcessLookupError):
                    if pid := self._worker(stage):
                        victim = held.enter_context(Victim(pid))
                        loading = fault in ("SIGKILL", "SIGSTOP") and self._state_of(pid) != "ready"
                        self.killed.add(pid)
                        hit.append((victim, self._inject(fault + " while loading" * loading, stage)))
            if not hit:
                return
            order = self._kill_helper.send(number, [victim for victim, _ in hit])
        for victim, injection in hit:
            injection.order = order
            self._follow_soon(injection, functools.partial(_is_of, victim.pid))

    async def _pause(self, stage: str, for_s: float) -> None:
        pid = self._worker(stage)
        if pid is None:
            return
        with suppress(ProcessLookupError), Victim(pid) as victim:
            self._inject("SIGSTOP, then SIGCONT", stage)
            victim.send(signal.SIGSTOP)
            self._unfollowed += 1
            try:
                await trio.sleep(min(for_s, self._workload.pipeline.stages[stage].step_timeout_s / 2))
            finally:
                if pid not in self.killed:  # it may have been stopped for good meanwhile
                    victim.send(signal.SIGCONT)
                self._unfollowed -= 1

    def _crash(self, crash: schedule.Crash) -> None:
        stage = crash.stage
        if stage in self.watch.given_up:
            return
        deaths = judge.max_deaths_by_one_request(self._workload.pipeline.limits)
        self.asked_for[stage] += 1 if crash.on_failure == "fail" else deaths
        fault = CRASHES[crash.how] + (", replayed" if crash.on_failure == "replay" else "")
        injection = self._inject(fault, stage)
        hooks = {"stage": stage, **HOOKS[crash.how]}
        asked = self.client.submit(self._workload.probe(stage), crash.on_failure, hooks=hooks)
        self._follow_soon(injection, lambda death: death.stage == stage and death.pid not in self.killed, asked)

    async def _starve(self, stage: str) -> None:
        pid = self._worker(stage)
        if pid is None:
            return
        with suppress(ProcessLookupError), Victim(pid) as victim:
            self.asked_for[stage] += 1
            injection = self._inject("out of memory", stage)
            victim.limit_memory()
            largest = max(self._workload.templates.values(), key=lambda each: stage in each.stages and len(each.stages))
            self.client.submit(largest, "replay")
            self._unfollowed += 1
            with trio.move_on_after(STARVED_S):
                await self.watch.until(lambda: any(death.pid == pid for death in self.watch.deaths))
                self._follow_soon(injection, lambda death: death.pid == pid)
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
        self, injection: _Injection, is_its: Callable[[ObservedDeath], bool], carrier: TrackedRequest | None = None
    ) -> None:
        """Follow a fault until a request that needs its stage is answered.

        is_its: recognises the death that the fault causes. carrier: the request that causes it.
        """
        self._following.append(injection)
        self._nursery.start_soon(self._follow, injection, is_its, carrier)

    async def _follow(
        self, injection: _Injection, is_its: Callable[[ObservedDeath], bool], carrier: TrackedRequest | None
    ) -> None:
        timing, stage, watch = injection.timing, injection.stage, self.watch

        def death() -> ObservedDeath | None:
            return next((death for death in watch.deaths if death.at >= injection.at and is_its(death)), None)

        with trio.move_on_after(self._workload.patience_s) as patience:
            if carrier is None:
                await watch.until(lambda: death() is not None)
            else:
                await self.client.until_ended(carrier)
            lost = death()
            if injection.order is not None:
                injection.hit = await self._kill_helper.done_at(injection.order)
            if lost is None or lost.at < injection.hit:  # the carrier was aborted, or another fault came first
                self._forget(injection)
                return
            timing.detected_s = lost.at - injection.hit
            probe = self.client.submit(self._workload.probe(stage), "replay")
            await watch.until(lambda: stage in watch.given_up or watch.serving_since(stage, lost.at) is not None)
            serving = watch.serving_since(stage, lost.at)
            if serving:
                timing.ready_s, timing.load_s = serving.at - injection.hit, serving.load_s
            await self.client.until_ended(probe)
            if serving and probe.outcome == "completed":
                timing.recovered_s = time.monotonic() - injection.hit
        self._forget(injection)
        if patience.cancelled_caught:
            missing = "detected" if timing.detected_s is None else "recovered"
            self.violations.append((injection.at, Violation("hung", f"{injection.fault} of {stage!r}: not {missing}")))
        elif not injection.overtaken:
            if not injection.alone:
                timing.ready_s = timing.recovered_s = timing.load_s = None
            self.tally.row(injection.fault, self._load).timings.append(timing)

    def _forget(self, injection: _Injection) -> None:
        self._following.remove(injection)
        self.client.ended.unpark_all()


def _is_of(pid: int, death: ObservedDeath) -> bool:
    return death.pid == pid
