"""What the harness observes of a system's health, on simulated workers in virtual time."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from omni_actors.config import Restart
from omni_actors.errors import StageUnavailable
from omni_actors.protocol.messages import Address
from omni_actors.stress.health_watch import HealthWatch
from tests.support.scaled_system import LOAD_S, opened


async def test_a_stage_was_given_up_though_a_replica_was_added_before_the_next_look(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with opened(restart=Restart(intensity=0)) as scaling, trio.open_nursery() as nursery:
        watch = HealthWatch(scaling.omni)
        watch.look()
        scaling.spawner.living[Address("second", 0)].kill()
        await trio.sleep(0.1)
        nursery.start_soon(scaling.omni.scale, "second", 2)
        await trio.sleep(LOAD_S / 2)
        watch.look()
        assert scaling.states == {0: "failed", 1: "loading"}
        with pytest.raises(StageUnavailable):
            scaling.ask()
        assert watch.ever_given_up == {"second"}


async def test_a_replica_that_was_given_up_beside_one_that_serves_is_not_its_stage(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with opened(restart=Restart(intensity=0), replicas=2) as scaling:
        watch = HealthWatch(scaling.omni)
        scaling.spawner.living[Address("second", 0)].kill()
        await trio.sleep(0.1)
        watch.look()
        assert scaling.states == {0: "failed", 1: "ready"}
        assert watch.ever_given_up == set()
