"""Carries out ``autoscale``: measures the demand of each such stage, and scales it as the rule decides.

Rules
1. ``autoscale_rule`` alone decides about numbers. A number that ``scale`` has set counts as its decision.
2. While new replicas of a stage load, decisions about it are made and not carried out. Replicas that drain delay no
   decision: more replicas may be wanted meanwhile, and ``scale_rule`` takes them back.
3. While generation is paused or the stage sleeps, nothing is decided: what waits then does not wait for replicas.
   The rule measures the load anew afterwards.
4. If a replica cannot load or be prepared, or there is no device for it, that is logged, and the next change waits for
   ``RETRY_S``.
5. A replica that was given up for good is removed after ``RETRY_S``, and the number becomes that of the others, but not
   less than ``min``. From then on, the rule decides about its successor.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import trio

from omni_actors.errors import InvalidRequest, StageAsleep, StageFailed, SystemClosed, TemporarilyRefused
from omni_actors.log_events import Autoscaled, AutoscaleFailed, record
from omni_actors.system.autoscale_rule import INTERVAL_S, AutoscaleRule, Demand
from omni_actors.system.scaling import Drain, ScaleControl

RETRY_S = 30.0


class AutoscaleControl(ScaleControl):
    """Scales stages by their load. It adds no method for callers."""

    async def _autoscale(self) -> None:
        """Scale the stages that have ``autoscale``, until cancelled."""
        async with trio.open_nursery() as nursery:
            for name, stage in self.pipeline.stages.items():
                if stage.autoscale is not None:
                    rule = AutoscaleRule(stage.autoscale, self.pipeline.concurrency(name))
                    nursery.start_soon(self._autoscale_stage, name, rule)

    async def _autoscale_stage(self, stage: str, rule: AutoscaleRule) -> None:
        changing = False

        async def change(before: int, after: int) -> None:
            nonlocal changing
            drains: Sequence[Drain] = ()
            try:
                with suppress(StageAsleep, SystemClosed):
                    async with self._changing[stage]:
                        if self._orchestrator.pools.wanted[stage] == before:  # ``scale`` may have come first
                            if after != before:
                                record(Autoscaled(stage=stage, before=before, after=after))
                            drains = await self._change(stage, after)
            except (InvalidRequest, StageFailed, TemporarilyRefused) as error:
                record(AutoscaleFailed(stage=stage, replicas=after, error=str(error), retry_in_s=RETRY_S))
                await trio.sleep(RETRY_S)
            finally:
                changing = False
            await self._drain_all(drains, None)

        async with trio.open_nursery() as nursery:
            while True:
                await trio.sleep(INTERVAL_S)
                if self._orchestrator.is_dispatch_paused or stage in self._orchestrator.closures.asleep:
                    rule.hold(trio.current_time())
                    continue
                demand = self._demand(stage)
                wanted, others = rule.decide(demand), self._beside_lost(stage)
                if others is not None:
                    wanted = max(rule.least, min(demand.wanted, others))
                if (wanted != demand.wanted or others is not None) and not changing:
                    changing = True
                    nursery.start_soon(change, demand.wanted, wanted)

    def _beside_lost(self, stage: str) -> int | None:
        """Return how many workers a stage has beside those that were given up too long ago; None: there are none."""
        staying = [each for each in self._orchestrator.pools.replicas(stage) if not each.leaving]
        since = trio.current_time() - RETRY_S
        lost = [each for each in staying if each.given_up and each.outage is not None and each.outage.began_at <= since]
        return len(staying) - len(lost) if lost else None

    def _demand(self, stage: str) -> Demand:
        pools = self._orchestrator.pools
        return Demand(
            now=trio.current_time(),
            arrived=pools.arrived[stage],
            unfinished=pools.unfinished_since(stage),
            wanted=pools.wanted[stage],
            ready=min(pools.wanted[stage], sum(each.accepts_work for each in pools.replicas(stage))),
        )
