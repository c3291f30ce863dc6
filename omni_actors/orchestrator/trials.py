"""Finds the request that ends its workers, in few deaths, and keeps the others away from it.

When a worker ends by itself (an exception, a crash signal, a hang), the requests that it was working on are suspects.

Rules
1. Where the engine raised in a call for one request, that request is the suspect. Otherwise all of them are.
2. Suspects with the same fingerprint form a unit. One of them is tried; the others share its result.
3. Suspects wait in groups, and one group of a stage is on trial at a time: it runs on a replica that takes no other
   request meanwhile. A group is cleared when it has run for its probation and its worker has taken a turn since: one
   that hangs is not. A unit is cleared when its tried request is done with the stage.
4. A group that is known to hold a culprit is halved: the less suspicious half goes on trial first, the rest after it.
   Less suspicious are units that were suspects less often, that have fewer requests, and that are older.
5. A death on trial belongs to the group on trial, where it ran alone. A death that only one unit can have caused is
   charged to that unit, the culprit: then each death that its requests were suspects in uses up a replay. Requests that
   are not charged lose none.
6. A culprit runs alone only. It waits until no other request has used the stage for ``QUIET_S``. After
   ``CULPRIT_PATIENCE_S``, one that was in a single death gets a replica that is drained for it, for ``DRAIN_S`` at the
   most; one that was in more deaths is given up. Any other group waits for a replica without other requests, for
   ``PATIENCE_S``, and then runs beside others.
   Bound: once a fingerprint is charged with a death, no other request is in the worker when one like it runs again,
   until it is cleared. Under steady load that is one more death, for which new requests wait as long as the drain and
   the reload take. (Requests that run on other replicas at the time of the first death are not taken off them.)
7. Each time that requests are suspects again, their probation is twice as long, up to ``LONGEST_PROBATION_S``: a
   request that ends its worker late is found, too, if it does so within that.
8. No I/O and no clock here: time is an argument, in seconds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from omni_actors.errors import WorkerExit
from omni_actors.orchestrator.request import Request
from omni_actors.protocol.messages import Address

PROBATION_S = 1.0
LONGEST_PROBATION_S = 30.0
QUIET_S = 1.0
PATIENCE_S = 1.0
CULPRIT_PATIENCE_S = 30.0
DRAIN_S = 10.0
"""How long a replica takes no new requests while it finishes the running ones, so that a culprit can be tried on it."""
OVERDUE_S = 0.25
"""How often it is looked whether the worker of a group whose probation is over has taken a turn."""
CRASH_SIGNALS = frozenset({"SIGSEGV", "SIGABRT", "SIGBUS", "SIGFPE", "SIGILL", "SIGSYS", "SIGTRAP"})


def died_by_itself(exit: WorkerExit) -> bool:
    """Whether what the worker was doing may have ended it: not a signal that another process sent."""
    return exit.reason is not None or exit.signal is None or exit.signal in CRASH_SIGNALS


@dataclass(eq=False)
class Group:
    """Suspects of one stage, in units by fingerprint.

    holds_culprit: whether one of them is known to have ended a worker. since: when the group began to wait. address and
    until: the replica and the end of its probation, while it is on trial. rest: the other half, where it is one.
    """

    stage: str
    units: dict[str, list[Request]]
    holds_culprit: bool
    since: float
    patience_s: float = CULPRIT_PATIENCE_S
    """How long a culprit waits for a quiet stage before a replica is drained for it; twice as long after each drain."""
    address: Address | None = None
    until: float = math.inf
    on_trial: Sequence[Request] = ()
    """The requests that are tried, while they are."""
    is_alone: bool = False
    """Whether its replica worked on no other request when its trial began."""
    rest: Group | None = None

    @property
    def requests(self) -> Iterator[Request]:
        return (request for unit in self.units.values() for request in unit)

    @property
    def tried(self) -> list[Request]:
        """One request of each unit, if possible one that its stages hold."""
        return [min(unit, key=lambda each: each.number is None) for unit in self.units.values()]

    @property
    def is_culprit(self) -> bool:
        return self.holds_culprit and len(self.units) == 1

    @property
    def deaths(self) -> int:
        """The deaths that its requests may have caused."""
        return max(each.suspected for each in self.requests)

    def halve(self, now: float) -> Group:
        """Split off the less suspicious half, which is returned."""
        ranked = sorted(self.units, key=lambda name: _suspicion(self.units[name]))
        half, taken = sum(map(len, self.units.values())) / 2, 0
        first: dict[str, list[Request]] = {}
        for name in ranked[:-1]:
            if first and taken + len(self.units[name]) > half:
                break
            first[name] = self.units.pop(name)
            taken += len(first[name])
        return Group(self.stage, first, holds_culprit=False, since=now, rest=self)


def _suspicion(unit: Sequence[Request]) -> tuple[int, int, int]:
    return max(each.suspected for each in unit), len(unit), max(each.number or 0 for each in unit)


@dataclass
class Trials:
    """The suspects of all stages."""

    waiting: list[Group] = field(default_factory=list)
    running: dict[Address, Group] = field(default_factory=dict)
    group_of: dict[Request, Group] = field(default_factory=dict)
    """The group of each suspect."""
    last_use: dict[str, tuple[float, Request]] = field(default_factory=dict)
    """When a request that was no suspect last used a stage, and which one."""

    def __bool__(self) -> bool:
        return bool(self.waiting or self.running)

    def used(self, stage: str, request: Request, now: float) -> None:
        """A request has begun or finished at a stage."""
        if request not in self.group_of:
            self.last_use[stage] = now, request

    def worker_died(self, address: Address, held: Sequence[Request], failed: Request | None, now: float) -> bool:
        """Find the suspects among the requests that a worker ``held`` when it ended by itself, and charge a culprit.

        failed: the request for which the engine's call raised. Returns whether these suspects cause their first death.
        """
        group, is_proof = self.running.get(address), False
        if group is not None:
            is_proof = group.is_alone
            self.interrupt(address)
        suspects = [each for each in held if is_proof and self.group_of.get(each) is group] or list(held)
        if failed is not None:
            suspects = [each for each in held if each.fingerprint == failed.fingerprint]
        if group is None or any(self.group_of.get(each) is not group for each in suspects):
            group = self._group_for(address.stage, suspects, now)
        known = bool(suspects) and all(each.suspected for each in suspects)
        for each in suspects:
            each.suspected += 1
        group.holds_culprit, group.since = True, now
        if group.rest is not None:
            group.rest.holds_culprit, group.rest = False, None
        if len(group.units) == 1:
            deaths = group.deaths
            for each in group.requests:
                each.suspected = deaths
            for each in suspects:
                each.charged = True
                each.charged_replays = max(each.charged_replays, deaths - 1)
        return not known

    def interrupt(self, address: Address | None) -> None:
        """The group that is on trial at this replica, if any, waits again."""
        if address is not None and (group := self.running.pop(address, None)) is not None:
            group.address, group.until, group.on_trial, group.is_alone = None, math.inf, (), False
            self.waiting.append(group)

    def _group_for(self, stage: str, suspects: Sequence[Request], now: float) -> Group:
        """The culprit's group where the suspects are like a known culprit, else a new one."""
        fingerprints = {each.fingerprint for each in suspects}
        groups = (each for each in self._groups() if each.stage == stage and each.is_culprit)
        group = next((each for each in groups if each.units.keys() == fingerprints), None)
        if group is None:
            group = Group(stage, {}, holds_culprit=True, since=now)
            if suspects:
                self.waiting.append(group)
        for request in suspects:
            if self.group_of.get(request) is not group:
                self._remove(request)
                self._add(request, group)
        return group

    def _add(self, request: Request, group: Group) -> None:
        unit = group.units.setdefault(request.fingerprint, [])
        request.suspected = max(each.suspected for each in (request, *unit))
        unit.append(request)
        self.group_of[request] = group

    def stages(self) -> set[str]:
        """The stages that have suspects."""
        return {group.stage for group in self._groups()}

    def _groups(self) -> Iterator[Group]:
        return iter((*self.waiting, *self.running.values()))

    def accuse(self, request: Request, stage: str, deaths: int, now: float) -> None:
        """Make a new request a known culprit, because of the deaths that earlier requests like it caused."""
        request.suspected = deaths
        self._group_for(stage, [request], now)

    def join(self, request: Request) -> bool:
        """Put a waiting request into the unit of its fingerprint. Returns False where there is none."""
        for group in self._groups():
            if request.fingerprint in group.units:
                self._add(request, group)
                return True
        return False

    def drop(self, request: Request) -> None:
        """Forget a request that has ended. The culprit may be gone with it: what is known of its group is void."""
        group = self.group_of.get(request)
        if group is None:
            return
        was_tried = request in group.on_trial
        if not self._remove(request):  # others like it are left
            if was_tried:
                self.interrupt(group.address)
            return
        group.holds_culprit = False
        if group.rest is not None:
            group.rest.holds_culprit, group.rest = False, None

    def passed(self, request: Request) -> bool:
        """A request is done with its stage: its unit is cleared. Returns whether that ends a trial."""
        group = self.group_of.get(request)
        if group is None:
            return False
        on_trial = group.address is not None
        for each in self.like(request):
            self._remove(each)
        self._remove(request)
        return on_trial and not group.units

    def like(self, request: Request) -> list[Request]:
        """The other suspects with its fingerprint."""
        group = self.group_of.get(request)
        unit = group.units.get(request.fingerprint, []) if group else []
        return [each for each in unit if each is not request]

    def _remove(self, request: Request) -> bool:
        """Take a request out of its group. Returns whether its unit ended with that."""
        group = self.group_of.pop(request, None)
        if group is None:
            return False
        unit = group.units[request.fingerprint]
        unit.remove(request)
        if unit:
            return False
        del group.units[request.fingerprint]
        if not group.units:
            if group.address is not None:
                del self.running[group.address]
            else:
                self.waiting.remove(group)
        return True

    def next(self, stage: str, now: float, *, idle: bool, wanted: bool) -> Group | None:
        """The group of a stage that is tried now; it is taken off the waiting ones.

        idle: whether a replica works on no request. wanted: whether a request that is no suspect waits for the stage.
        """
        waiting = [group for group in self.waiting if group.stage == stage]
        if not waiting or any(group.stage == stage for group in self.running.values()):
            return None
        group = min(waiting, key=lambda each: (each.holds_culprit, each.is_culprit, each.since))
        out_of_patience = now >= self._patient_until(group)
        if group.is_culprit:
            is_quiet = idle and not wanted and now >= self._quiet_at(group)
            if not is_quiet and not (out_of_patience and group.deaths == 1):
                return None
        elif not idle and not out_of_patience:
            return None
        if group.holds_culprit and not group.is_culprit:
            half = group.halve(now)
            self.group_of.update(dict.fromkeys(half.requests, half))
            return half
        self.waiting.remove(group)
        return group

    def hopeless(self, stage: str, now: float) -> list[Group]:
        """The culprits of a stage that cannot be tried again without harm to others, and were in enough deaths."""
        return [
            group
            for group in self.waiting
            if group.stage == stage and group.is_culprit and group.deaths > 1 and now >= self._patient_until(group)
        ]

    def drain(self, group: Group, address: Address, now: float) -> None:
        """Reserve a replica for a culprit, until it has finished the requests that run on it."""
        group.address, group.until = address, now + DRAIN_S
        self.running[address] = group

    def draining(self, stage: str) -> Group | None:
        """The culprit of a stage that a replica is being drained for."""
        return next((each for each in self.running.values() if each.stage == stage and not each.on_trial), None)

    def end_drain(self, group: Group, now: float) -> None:
        """Give the replica back to other requests: the culprit waits again."""
        group.since, group.patience_s = now, 2 * group.patience_s
        self.interrupt(group.address)

    def begin(self, group: Group, address: Address, now: float, *, alone: bool = True) -> None:
        """The group is on trial at this replica from now on. alone: the replica works on no other request."""
        group.address, group.on_trial, group.is_alone = address, group.tried, alone
        group.until = now + min(LONGEST_PROBATION_S, PROBATION_S * 2.0 ** (group.deaths - 1))
        self.running[address] = group

    def put_back(self, group: Group) -> None:
        """The group cannot be tried now."""
        if group.address is None:
            self.waiting.append(group)

    def clear_expired(self, turned_at: Callable[[Address], float]) -> bool:
        """End the trials whose probation is over. Returns whether there were any.

        turned_at: when the worker at an address took a turn the last time, as far as known.
        """
        over = [
            group for address, group in self.running.items() if group.on_trial and turned_at(address) >= group.until
        ]
        for group in over:
            for request in list(group.requests):
                self._remove(request)
        return bool(over)

    def next_time(self, now: float) -> float:
        """When a trial may begin or end although nothing else happens."""
        times = [group.until if group.until > now else now + OVERDUE_S for group in self.running.values()]
        for group in self.waiting:
            times.append(self._patient_until(group))
            if group.is_culprit:
                times.append(self._quiet_at(group))
        return min((time for time in times if time > now), default=math.inf)

    def _quiet_at(self, group: Group) -> float:
        """When no other request has used the group's stage for ``QUIET_S``."""
        time, request = self.last_use.get(group.stage, (-math.inf, None))
        return -math.inf if request in list(group.requests) else time + QUIET_S

    def _patient_until(self, group: Group) -> float:
        return group.since + (group.patience_s if group.is_culprit else PATIENCE_S)
