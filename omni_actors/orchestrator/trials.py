"""Finds the request that crashes its workers, in few deaths, and runs it apart from other requests.

When a worker ends by an exception, a crash signal or a hang, the requests that it was working on are suspects.

Rules
1. If the engine raised in a call for one request, the suspects are that request and those with its fingerprint.
   Otherwise all requests that the worker was working on are suspects.
2. Suspects with the same fingerprint form a unit. One of them is tried, and the others share its result. If one of
   them becomes a suspect of another stage, those that wait for that stage follow it.
3. Suspects wait in groups. One group of a stage is on trial at a time, on a replica that takes no other request
   meanwhile. A unit is cleared when the stage has finished its tried request, or when it turns out that the stage had
   nothing more to do for one of its requests. A group is cleared when its probation is over and its worker has answered
   a ping since; so a worker that hangs does not clear its group. If another stage of a tried request starts again, the
   probation does too.
4. A group that is known to contain a culprit is halved. The less suspicious half is tried first: units that were
   suspects in fewer deaths, that have fewer requests, and that are older. If a suspect leaves without a result, it may
   have been the culprit: the others are tried in halves too, each of which may contain none.
5. If the group is alone on its replica, a death on trial belongs to that group. It is not if one of its requests has
   left for another group: the replica may still work on that one. A death that only one unit can have
   caused is charged to that unit, the culprit: each death in which it was a suspect uses up a replay of its requests.
   Other requests lose no replay.
6. A culprit runs alone. It waits until no other request has used the stage for ``STAGE_QUIET_S``. If that takes longer
   than ``CULPRIT_WAIT_S``, a culprit with one death gets a replica that is drained for it, and one with more deaths
   ends. If the drain takes longer than ``REPLICA_DRAIN_S``, the culprit waits again, for twice as long. Any other group
   waits ``GROUP_WAIT_S`` for an unused replica, then runs beside other requests. The time before the stage last began
   to serve does not count.
7. With each death, the probation of a group doubles, up to ``LONGEST_PROBATION_S``. So a request that crashes its
   worker late is found too, if it does so within that time.
8. This module does no I/O and has no clock: time is an argument, in seconds.

Bound: after a death is charged to a fingerprint, requests with it run alone until they are cleared. So other requests
lose work in that one death only. Under steady load there is one more death, on the drained replica. If the stage has
one replica, new requests wait for that drain, trial and reload. The bound does not cover requests with the fingerprint
that other replicas run at the time of the first death, deaths after the probation, or the deaths that halving takes
while the culprit is unknown.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from omni_actors.errors import WorkerExit
from omni_actors.orchestrator.request import Request
from omni_actors.protocol.messages import Address

PROBATION_S = 1.0
"""The probation of a group after one death."""
LONGEST_PROBATION_S = 30.0
STAGE_QUIET_S = 1.0
"""A stage is quiet when no request but the culprit has used it for this long."""
GROUP_WAIT_S = 1.0
"""How long a group that is no culprit waits for an unused replica."""
CULPRIT_WAIT_S = 30.0
"""How long a culprit waits for a quiet stage, at first."""
REPLICA_DRAIN_S = 10.0
"""How long a replica that is drained for a culprit takes no new requests, at most."""
PONG_CHECK_S = 0.25
"""The interval at which a group whose probation is over is checked for an answered ping."""
CRASH_SIGNALS = frozenset({"SIGSEGV", "SIGABRT", "SIGBUS", "SIGFPE", "SIGILL", "SIGSYS", "SIGTRAP"})


def died_by_itself(exit: WorkerExit) -> bool:
    """Whether the worker's own work may have ended it, in contrast to a signal of another process and a lost node."""
    if exit.was_cut_off:
        return False
    return exit.reason is not None or exit.signal is None or exit.signal in CRASH_SIGNALS


@dataclass(eq=False)
class Group:
    """Suspects of one stage, in units by fingerprint."""

    stage: str
    units: dict[str, list[Request]]
    """In a unit, the last request was a suspect in the most deaths."""
    has_culprit: bool
    """Whether one of the units is known to have ended a worker."""
    since: float
    """When the group began to wait."""
    failed_drains: int = 0
    """How often a replica could not be drained for the group."""
    address: Address | None = None
    """The replica that is drained for the group or runs its trial."""
    ends_at: float = math.inf
    """When the drain, or the probation, ends."""
    on_trial: Sequence[Request] = ()
    """The requests that are being tried; empty during a drain."""
    is_alone: bool = False
    """Whether its replica was working on no other request when the trial began, and no request has left for another
    group since."""
    other_half: Group | None = None
    """The group that this one was split off from."""

    @property
    def requests(self) -> Iterator[Request]:
        return (request for unit in self.units.values() for request in unit)

    @property
    def candidates(self) -> list[Request]:
        """One request of each unit, preferably one that was dispatched before."""
        return [min(unit, key=lambda each: each.number is None) for unit in self.units.values()]

    @property
    def is_culprit(self) -> bool:
        """Whether the group is a single unit that is known to have ended a worker."""
        return self.has_culprit and len(self.units) == 1

    @property
    def suspected_deaths(self) -> int:
        """The number of deaths that its requests may have caused."""
        return max(unit[-1].deaths.suspected for unit in self.units.values())

    def clear_other_half(self) -> None:
        """The half that this group was split off from is not known to contain a culprit any more."""
        if self.other_half is not None:
            self.other_half.has_culprit, self.other_half = False, None

    def halve(self, since: float) -> Group:
        """Split off the less suspicious half and return it. since: when it began to wait."""
        ranked = sorted(self.units, key=lambda name: _suspicion(self.units[name]))
        half, taken = sum(map(len, self.units.values())) / 2, 0
        first: dict[str, list[Request]] = {}
        for name in ranked[:-1]:
            if first and taken + len(self.units[name]) > half:
                break
            first[name] = self.units.pop(name)
            taken += len(first[name])
        return Group(self.stage, first, has_culprit=False, since=since, other_half=self)


def _suspicion(unit: Sequence[Request]) -> tuple[int, int, int]:
    return unit[-1].deaths.suspected, len(unit), max(each.number or 0 for each in unit)


@dataclass
class Trials:
    """The suspects of all stages."""

    group_of: dict[Request, Group] = field(default_factory=dict)
    """The group of each suspect."""
    _groups: dict[Group, None] = field(default_factory=dict)
    """The groups that have a suspect, in the order in which they were found."""
    running: dict[Address, Group] = field(default_factory=dict)
    """The groups that a replica is reserved for: on trial there, or waiting for its drain. All others wait."""
    last_use: dict[str, tuple[float, Request]] = field(default_factory=dict)
    """For each stage, when a request that is not a suspect last used it, and which request."""
    serving_since: dict[str, float] = field(default_factory=dict)
    """For each stage, when it last became able to serve after it had no ready worker."""

    def __bool__(self) -> bool:
        return bool(self.group_of)

    @property
    def groups(self) -> list[Group]:
        """The groups of all stages."""
        return list(self._groups)

    def waiting(self, stage: str) -> list[Group]:
        """Return the groups of a stage that have no replica."""
        return [group for group in self.groups if group.stage == stage and group.address is None]

    def note_use(self, stage: str, request: Request, now: float) -> None:
        """Record that a stage has started or finished a request."""
        if request not in self.group_of:
            self.last_use[stage] = now, request

    def worker_died(self, address: Address, unfinished: Sequence[Request], failed: Request | None, now: float) -> bool:
        """Find the suspects of a death that the worker's own work may have caused, and charge a culprit.

        Args:
            address: The replica whose worker died.
            unfinished: The requests that the worker was working on.
            failed: The request for which the engine's call raised, if known.
            now: The current time.

        Returns:
            Whether the death is the first one of at least one suspect. Later ones do not count against the restart
            intensity.
        """
        group = self.running.get(address)
        is_certain = group is not None and group.is_alone
        self.return_replica(address)
        suspects = [each for each in unfinished if is_certain and self.group_of.get(each) is group] or list(unfinished)
        if failed is not None:
            suspects = [each for each in unfinished if each.fingerprint == failed.fingerprint]
        if group is None or any(self.group_of.get(each) is not group for each in suspects):
            group = self._group_for(address.stage, suspects, now)
        known = bool(suspects) and all(each.deaths.suspected for each in suspects)
        for each in suspects:
            each.deaths.suspected += 1
        for unit in group.units.values():
            most = max(each.deaths.suspected for each in unit)
            for each in unit:
                each.deaths.suspected = most
        group.has_culprit, group.since = True, now
        group.clear_other_half()
        if len(group.units) == 1:
            for each in suspects:
                each.deaths.to_charge.add(address.stage)
                charged = each.deaths.charged
                charged[address.stage] = max(charged.get(address.stage, 0), each.deaths.suspected - 1)
        return not known

    def return_replica(self, address: Address | None) -> None:
        """End the trial or the drain at a replica, if there is one: the group waits again.

        This is no proof against the group: the supervisor may have restarted the worker with another stage.
        """
        if address is not None and (group := self.running.pop(address, None)) is not None:
            group.address, group.ends_at, group.on_trial, group.is_alone = None, math.inf, (), False

    def _group_for(self, stage: str, suspects: Sequence[Request], now: float) -> Group:
        """Return the known culprit's group if all suspects have its fingerprint, else a new one.

        The suspects leave their earlier groups for it, with others that are like them and wait for the stage.
        """
        fingerprints = {each.fingerprint for each in suspects}
        culprits = (each for each in self.groups if each.stage == stage and each.is_culprit)
        group = next((each for each in culprits if each.units.keys() == fingerprints), None)
        group = group or Group(stage, {}, has_culprit=True, since=now)
        alike = [
            each for each in self.group_of if each.fingerprint in fingerprints and stage in each.replay_state.waiting
        ]
        for request in dict.fromkeys([*suspects, *alike]):
            if (left := self.group_of.get(request)) is not group:
                is_unit_gone = self._remove(request)
                if left is not None:
                    left.is_alone = False  # its replica may still work on the request
                    if is_unit_gone:
                        self._doubt(left)
                self._add(request, group)
        return group

    def _add(self, request: Request, group: Group) -> None:
        unit = group.units.setdefault(request.fingerprint, [])
        if unit:
            request.deaths.suspected = max(request.deaths.suspected, unit[-1].deaths.suspected)
        unit.append(request)
        self.group_of[request] = group
        self._groups[group] = None

    def add_known_culprit(self, request: Request, stage: str, deaths: int, now: float) -> None:
        """Treat a new request as a known culprit, because of the deaths that requests with its fingerprint caused."""
        request.deaths.suspected = deaths
        self._group_for(stage, [request], now)

    def join(self, request: Request) -> bool:
        """Add a request to the unit of its fingerprint, if it waits for that unit's stage. Return whether it does."""
        for group in self.groups:
            if request.fingerprint in group.units and group.stage in request.replay_state.waiting:
                self._add(request, group)
                return True
        return False

    def drop(self, request: Request) -> bool:
        """Remove a request that ended without a result. Return whether its unit is gone.

        It may have been the culprit: see ``_doubt``.
        """
        group = self.group_of.get(request)
        if group is None:
            return False
        was_tried = request in group.on_trial
        if not self._remove(request):  # its unit has more requests
            if was_tried:
                self.return_replica(group.address)
            return False
        self._doubt(group)
        return True

    def _doubt(self, group: Group) -> None:
        """Handle that a unit has left a group without a result: it may have been the culprit.

        The rest of the group may contain none, and neither may the half that was known to contain it if this one did
        not.
        """
        for doubtful in (group, group.other_half):
            if doubtful is not None and doubtful.has_culprit and len(doubtful.units) > 1:
                self._split(doubtful, doubtful.since).other_half = None
        group.has_culprit = False
        group.clear_other_half()

    def clear(self, request: Request) -> None:
        """Remove a request that its stage has finished, and the others of its unit."""
        for each in (*self.requests_of_unit(request), request):
            self._remove(each)

    def requests_of_unit(self, request: Request) -> list[Request]:
        """Return the other requests of a suspect's unit."""
        group = self.group_of.get(request)
        unit = group.units.get(request.fingerprint, []) if group else []
        return [each for each in unit if each is not request]

    def _remove(self, request: Request) -> bool:
        """Take a request out of its group. Return whether its unit is gone."""
        group = self.group_of.pop(request, None)
        if group is None:
            return False
        unit = group.units[request.fingerprint]
        unit.remove(request)
        if unit:
            return False
        del group.units[request.fingerprint]
        if not group.units:
            del self._groups[group]
            if group.address is not None:
                del self.running[group.address]
        return True

    def is_due(self, stage: str, now: float) -> bool:
        """Return whether a stage may try a group now, if a replica is free, or end a culprit that cannot be tried."""
        group = self._first(stage)
        if group is not None and (not group.is_culprit or now >= min(self._quiet_at(group), self._waits_until(group))):
            return True
        return bool(self.exhausted(stage, now))

    def _first(self, stage: str) -> Group | None:
        """Return the group that a stage tries first; None: there is none, or the stage is trying another one."""
        waiting = self.waiting(stage)
        if not waiting or any(group.stage == stage for group in self.running.values()):
            return None
        return min(waiting, key=lambda each: (each.has_culprit, each.is_culprit, each.since))

    def next(self, stage: str, now: float, *, is_unused: bool, others_wait: bool) -> Group | None:
        """Return the group that a stage tries next, or a culprit that needs a drained replica; None: none is due.

        Args:
            stage: The stage, which has a ready replica.
            now: The current time.
            is_unused: Whether a replica of the stage works on no request.
            others_wait: Whether a request that is not a suspect waits for the stage.
        """
        if (group := self._first(stage)) is None:
            return None
        wait_is_over = now >= self._waits_until(group)
        if group.is_culprit:
            stage_is_free = is_unused and not others_wait and now >= self._quiet_at(group)
            if not stage_is_free and not (wait_is_over and group.suspected_deaths == 1):
                return None
        elif not is_unused and not wait_is_over:
            return None
        return self._split(group, now) if group.has_culprit and not group.is_culprit else group

    def _split(self, group: Group, since: float) -> Group:
        half = group.halve(since)
        self.group_of.update(dict.fromkeys(half.requests, half))
        self._groups[half] = None
        return half

    def exhausted(self, stage: str, now: float) -> list[Group]:
        """Return the culprits of a stage that have caused more than one death and found no quiet moment in time."""
        return [
            group
            for group in self.waiting(stage)
            if group.is_culprit and group.suspected_deaths > 1 and now >= self._waits_until(group)
        ]

    def drain(self, group: Group, address: Address, now: float) -> None:
        """Reserve a replica for a culprit, so that its running requests finish and no new ones start."""
        group.address, group.ends_at = address, now + REPLICA_DRAIN_S
        self.running[address] = group

    def draining(self, stage: str) -> Group | None:
        """Return the culprit of a stage for which a replica is being drained."""
        return next((each for each in self.running.values() if each.stage == stage and not each.on_trial), None)

    def end_drain(self, group: Group, now: float) -> None:
        """Give a drained replica back to other requests: the culprit waits again, for twice as long."""
        group.since, group.failed_drains = now, group.failed_drains + 1
        self.return_replica(group.address)

    def begin(self, group: Group, address: Address, now: float, *, alone: bool = True) -> None:
        """Put a group on trial at a replica, or begin its probation again. alone: whether nothing else runs there."""
        group.address, group.on_trial, group.is_alone = address, group.candidates, alone
        group.ends_at = now + min(LONGEST_PROBATION_S, PROBATION_S * 2.0 ** (group.suspected_deaths - 1))
        self.running[address] = group

    def put_off(self, seconds: float, now: float) -> None:
        """Let the waits and the drains end later, because workers made no steps for so long, until now."""
        for group in self.groups:
            group.since = min(now, group.since + seconds)
            if not group.on_trial:
                group.ends_at += seconds
        for stage, since in self.serving_since.items():
            self.serving_since[stage] = min(now, since + seconds)
        for stage, (used, request) in self.last_use.items():
            self.last_use[stage] = min(now, used + seconds), request

    def clear_expired(self, last_pong_at: Callable[[Address], float]) -> bool:
        """Clear the groups whose probation is over. Return whether there were any.

        last_pong_at: when the worker at an address answered a ping the last time.
        """
        expired = [
            group
            for address, group in self.running.items()
            if group.on_trial and last_pong_at(address) >= group.ends_at
        ]
        for group in expired:
            for request in list(group.requests):
                self._remove(request)
        return bool(expired)

    def next_time(self, now: float) -> float:
        """Return the earliest time at which a trial may begin or end without another event."""
        times = []
        for group in self.groups:
            if group.address is not None:
                times.append(group.ends_at if group.ends_at > now else now + PONG_CHECK_S)
                continue
            times.append(self._waits_until(group))
            if group.is_culprit:
                times.append(self._quiet_at(group))
        return min((time for time in times if time > now), default=math.inf)

    def _quiet_at(self, group: Group) -> float:
        """Return when the stage of a culprit is quiet, if no other request uses it before."""
        time, request = self.last_use.get(group.stage, (-math.inf, None))
        return -math.inf if request is not None and self.group_of.get(request) is group else time + STAGE_QUIET_S

    def _waits_until(self, group: Group) -> float:
        began = max(group.since, self.serving_since.get(group.stage, group.since))
        return began + (CULPRIT_WAIT_S * 2.0**group.failed_drains if group.is_culprit else GROUP_WAIT_S)
