"""Changing the number of a stage's replicas while the system serves.

Rules
1. One change of a stage runs at a time; a later one waits until its new replicas are ready. It does not wait for
   replicas that drain: ``scale_rule`` takes these back where more are wanted. A stage that sleeps is not scaled
   (``StageAsleep``).
2. A new replica has the desired state before it is ready, as every worker, and gets requests from then on.
3. A replica that is removed is drained first: it gets no new request. Those that are left when ``drain_s`` has passed
   lose their work there as by a death, and resume at another replica, at no cost of ``limits.replays``. A replica can
   be taken back while it drains and its worker lives. It has the desired state, as it has got every change of it.
4. The number that is wanted changes at once; replicas follow. If a new one cannot load, or has to wait for a place on
   a node, it is removed again, unless the stage had one given up before in its place. One that a request has started
   may wait for its place: nodes that were lost come back.
5. A replica's number decides its devices (``config/devices.py``). Numbers are below the number of workers at the time
   when the replica was added, so the devices of two replicas never overlap. A worker that is being stopped still has
   its devices: a change that adds replicas waits for its end.
6. A replica that was given up for good is no capacity. A change removes it and adds a new one in its place.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import trio

from omni_actors.config import Pipeline
from omni_actors.config.devices import DeviceLayoutError
from omni_actors.config.schema import MAX_REPLICAS
from omni_actors.errors import InvalidRequest, StageAsleep, StageFailed, SystemClosed, TemporarilyRefused
from omni_actors.log_events import AutoscaleFailed, record
from omni_actors.protocol.messages import Address, WorkerSpec
from omni_actors.stages.assets import ModelNotFound
from omni_actors.supervisor.replica import Replica, ReplicaState
from omni_actors.system import machine
from omni_actors.system.control import Control
from omni_actors.system.scale_rule import Change, plan_change
from omni_actors.system.workers import worker_spec
from omni_actors.validation import require_seconds


class Scaled(msgspec.Struct, frozen=True, kw_only=True):
    """What ``scale`` has done.

    Attributes:
        stage: The stage.
        before: The number of its replicas before, standbys aside.
        after: The number that it is to have now. It is what was asked for, unless a later change took replicas back.
        seconds: How long the change took, earlier changes of the stage aside.
    """

    stage: str
    before: int
    after: int
    seconds: float


@dataclass(eq=False)
class Drain:
    """A replica that is to be removed and finishes its requests. scope: cancelled to end the drain."""

    replica: Replica
    taken_back: bool = False
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)


class ScaleControl(Control):
    """The method of ``OmniSystem`` that changes the number of replicas."""

    pipeline: Pipeline
    _models: Mapping[str, Path]

    def __init__(self) -> None:
        super().__init__()
        self._changing = defaultdict[str, trio.Lock](trio.Lock)
        """Held while replicas of a stage are added or chosen for removal, or must not change."""
        self._drains: dict[Replica, Drain] = {}
        """The drains that go on. The replicas of others that leave are being stopped."""

    async def scale(self, stage: str, replicas: int, *, drain_s: float | None = None) -> Scaled:
        """Change the number of a stage's replicas while it serves, and return when all new ones are ready.

        Args:
            stage: The stage.
            replicas: How many it is to have, standbys aside, from 0 to 64. With 0, its requests wait until it has one
                again, or their deadline passes; with ``scale_from_zero``, such a request starts one.
            drain_s: Seconds that requests may run on at a replica that is removed; by default the stage's ``drain_s``.
                Those that are left resume at another replica, or end with ``StageCrashed`` if they cannot (see
                ``on_failure``, ``deterministic``, ``resumable``).

        Returns:
            The number before and after, and the time.

        Raises:
            InvalidRequest: An argument is wrong, or there are not enough devices for the replicas (code "no_devices");
                nothing has changed. On a cluster, no node has room for a new replica (the same code); then the same
                holds as for StageFailed.
            TemporarilyRefused: The system lacks files or descriptors for new replicas (code "cannot_start"); nothing
                has changed.
            StageAsleep: The stage sleeps; nothing has changed.
            StageFailed: A new replica cannot load. It is removed again; those that did load stay.
            SystemClosed: The system was closed before the change was complete.

        A change of the same stage that loads replicas is waited for. Replicas that an earlier change drains are taken
        back if more are wanted; that change then returns. A cancelled call: new replicas load on and serve; a replica
        that is being removed is not drained any longer.
        """
        self._check_scale(stage, replicas, drain_s)
        async with self._changing[stage]:
            pools, began = self._orchestrator.pools, trio.current_time()
            before = pools.wanted[stage]
            drains = await self._change(stage, replicas)
        await self._drain_all(drains, drain_s)
        after = pools.wanted[stage] if any(each.taken_back for each in drains) else replicas
        return Scaled(stage=stage, before=before, after=after, seconds=trio.current_time() - began)

    async def _change(self, stage: str, replicas: int, *, is_needed: bool = False) -> list[Drain]:
        """Change the number of replicas, and return the drains that have begun. The caller holds the stage's lock.

        is_needed: whether requests wait for a replica. Then the stage does not fall asleep before these have ended, and
        they wait on if no node has room for it now.
        There is no checkpoint after drains have begun, so the caller always gets them.
        """
        pools, workers = self._orchestrator.pools, self.pipeline.stages[stage].workers_for(replicas)
        before = pools.wanted[stage]
        self._require_open(stage, is_needed=is_needed)
        while True:
            change, given_up = self._plan(stage, workers), self._given_up(stage)
            if unreaped := [each for each in given_up if not each.incarnation.ended.is_set()]:
                await unreaped[0].incarnation.ended.wait()
            elif change.new and self._stopping(stage):
                await self.wait_changed()
            else:
                break
            self._require_open(stage, is_needed=is_needed)
        specs = self._new_specs(stage, workers) if change.new else []
        for each in given_up:  # no checkpoint until there are others: no request may wait for these
            self._supervisor.forget(each)
            pools.remove(each)
        for each in change.returning:
            self._take_back(each)
        pools.want(stage, replicas)
        if specs:
            await self._add(stage, specs, min(before, replicas), may_wait=is_needed)
        return self._begin_drains(change.leaving)

    def _require_open(self, stage: str, *, is_needed: bool) -> None:
        """Raise SystemClosed or StageAsleep if a stage cannot be scaled now."""
        self._require_running()
        if stage in self._orchestrator.closures.asleep and not is_needed:
            raise StageAsleep(stage)

    def _plan(self, stage: str, workers: int) -> Change[Replica]:
        """Return what a change to ``workers`` replicas does now: of those that drain, the busiest one returns first."""
        order = self._orchestrator.pools.leave_order(stage)
        draining = [each for each in reversed(order) if each in self._drains and each.can_stay]
        return plan_change(workers, [each for each in order if not each.leaving and not each.given_up], draining)

    def _given_up(self, stage: str) -> list[Replica]:
        """Return the replicas of a stage that were given up for good, those that are being removed aside."""
        return [each for each in self._orchestrator.pools.replicas(stage) if each.given_up and not each.leaving]

    def _stopping(self, stage: str) -> bool:
        """Whether a stage has replicas that leave and cannot be taken back: they are gone soon."""
        replicas = self._orchestrator.pools.replicas(stage)
        return any(each.leaving and not (each in self._drains and each.can_stay) for each in replicas)

    def _take_back(self, replica: Replica) -> None:
        """Let a replica that drains serve again."""
        drain = self._drains.pop(replica)
        drain.taken_back = True
        self._supervisor.keep(replica)
        self._orchestrator.pools.take_back(replica)
        drain.scope.cancel()

    def _new_specs(self, stage: str, workers: int) -> list[WorkerSpec]:
        """Return what the workers run that a stage lacks. Raises InvalidRequest, TemporarilyRefused (see ``scale``)."""
        taken = {each.address.replica for each in self._orchestrator.pools.replicas(stage) if not each.given_up}
        free = [number for number in range(workers) if number not in taken][: max(0, workers - len(taken))]
        try:
            devices = machine.layout(self.pipeline, stage, workers) if free else ()
            return [worker_spec(self.pipeline, self._models, Address(stage, each), devices[each]) for each in free]
        except DeviceLayoutError as error:
            raise _no_devices(str(error)) from error
        except (OSError, ModelNotFound) as error:
            raise TemporarilyRefused(f"stage {stage!r} cannot start replicas: {error}", code="cannot_start") from error

    async def _add(self, stage: str, specs: Sequence[WorkerSpec], least: int, *, may_wait: bool) -> None:
        """Add replicas, and wait until each has been ready. Raises StageFailed, SystemClosed, InvalidRequest.

        least: how many the stage has afterwards even if none can load; of those, some were given up then.
        may_wait: whether one that has to wait for a place on a node is left to that. If not, it raises InvalidRequest.
        """
        pools = self._orchestrator.pools
        added = [self._supervisor.add(spec) for spec in specs]
        for each in added:
            pools.add(each)
        while not all(_is_decided(each) for each in added):
            await self.wait_changed()
        not_ready = [each for each in added if each.load_s is None]
        if failed := [each for each in not_ready if each.state is ReplicaState.FAILED or not may_wait]:
            left = sum(not each.leaving for each in pools.replicas(stage)) - len(failed)
            pools.want(stage, max(least, min(pools.wanted[stage], left)))  # rather a replica than a standby
            error = failed[0].failure or _no_devices(str(failed[0].incarnation.no_place))
            await self._drain_all(self._begin_drains(failed[max(0, least - left) :]), 0.0)
            raise error.with_traceback(None)

    def _begin_drains(self, leaving: Sequence[Replica]) -> list[Drain]:
        """Give replicas that leave no more requests. The caller waits for the drains (``_drain_all``)."""
        drains = [Drain(each) for each in leaving]
        for drain in drains:
            self._supervisor.drain(drain.replica)
            self._drains[drain.replica] = drain
        return drains

    async def _drain_all(self, drains: Sequence[Drain], drain_s: float | None) -> None:
        """Wait until drains have ended, all at the same time, and remove the replicas that were not taken back."""
        async with trio.open_nursery() as nursery:
            for each in drains:
                seconds = each.replica.stage.drain_s if drain_s is None else drain_s
                nursery.start_soon(self._drain, each, seconds)

    async def _drain(self, drain: Drain, drain_s: float) -> None:
        """Remove a replica when it holds no request any more, at the latest after ``drain_s``."""
        pools, replica = self._orchestrator.pools, drain.replica
        try:
            drain.scope.deadline = trio.current_time() + drain_s
            with drain.scope:
                await pools.wait_unused(replica.address)
        finally:
            if not drain.taken_back:
                del self._drains[replica]
                reason = None
                if pools.loads[replica.address]:
                    reason = f"removed by scale: its requests did not end within the drain time of {drain_s:g} s"
                with trio.CancelScope(shield=True):
                    await self._supervisor.remove(replica, reason)
                pools.remove(replica)

    def _check_scale(self, stage: str, replicas: Any, drain_s: float | None) -> None:
        """Raise InvalidRequest if an argument is wrong."""
        if stage not in (known := list(self._supervisor.stages)):
            raise InvalidRequest(f"stage: there is no stage {stage!r}; stages: {known}", param="stage")
        if not isinstance(replicas, int) or isinstance(replicas, bool) or not 0 <= replicas <= MAX_REPLICAS:
            message = f"replicas: expected an integer from 0 to {MAX_REPLICAS}, found {replicas!r:.200}"
            raise InvalidRequest(message, param="replicas")
        if drain_s is not None:
            require_seconds("drain_s", drain_s)

    @asynccontextmanager
    async def _unscaled(self, stages: Collection[str]) -> AsyncIterator[None]:
        """Keep the replicas of stages the same within the block, after the changes and the drains that go on already.

        Raises SystemClosed.
        """
        ordered = [stage for stage in self._supervisor.stages if stage in stages]  # one order: no deadlock
        held = list[trio.Lock]()
        try:
            for stage in ordered:
                await self._changing[stage].acquire()
                held.append(self._changing[stage])
                while any(each.leaving for each in self._orchestrator.pools.replicas(stage)):
                    await self.wait_changed()
            yield
        finally:
            for lock in held:
                lock.release()

    # scaling from zero

    def _starts_when_needed(self, stage: str) -> bool:
        """Whether a stage has no replica because none is needed now."""
        return self._orchestrator.pools.wanted[stage] == 0 and self.pipeline.stages[stage].starts_from_zero

    async def _scale_from_zero(self) -> None:
        """Start a replica of each stage that a request waits for, where the pipeline asks for that.

        The requests that wait for a stage that cannot have one now end with TemporarilyRefused.
        """
        if not any(stage.starts_from_zero for stage in self.pipeline.stages.values()):
            return
        pools, starting = self._orchestrator.pools, set[str]()

        async def start(stage: str) -> None:
            try:
                with suppress(StageAsleep, SystemClosed):
                    async with self._changing[stage]:
                        if self._starts_when_needed(stage) and stage in pools.starved():
                            await self._change(stage, 1, is_needed=True)
            except StageFailed as error:  # the requests that waited have ended with it
                record(AutoscaleFailed(stage=stage, replicas=1, error=str(error), retry_in_s=0.0))
            except (InvalidRequest, TemporarilyRefused) as error:
                record(AutoscaleFailed(stage=stage, replicas=1, error=str(error), retry_in_s=0.0))
                pools.refuse_waiting(stage, str(error))
            finally:
                starting.discard(stage)
                if self._running and not self.is_stopped:
                    pools.unplaced.unpark_all()  # for requests that began to wait while it was being started

        async with trio.open_nursery() as nursery:
            while True:
                for stage in pools.starved(starting):
                    if self._starts_when_needed(stage):
                        starting.add(stage)
                        nursery.start_soon(start, stage)
                await pools.unplaced.park()


def _is_decided(added: Replica) -> bool:
    """Whether an added replica has been ready, or is not going to be for now."""
    has_no_place = added.incarnation.no_place is not None
    return added.load_s is not None or added.state is ReplicaState.FAILED or has_no_place


def _no_devices(reason: str) -> InvalidRequest:
    return InvalidRequest(f"replicas: {reason}", param="replicas", code="no_devices")
