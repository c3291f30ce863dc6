"""Pumps that fail: an order that fails costs one worker, and a thread that fails costs its links."""

from __future__ import annotations

import os
import signal
from typing import NoReturn

import pytest

from omni_actors.cluster.agent_rings import AgentRings
from omni_actors.cluster.control import CloseRing, MakeRing
from omni_actors.cluster.pump import Pump
from omni_actors.cluster.receiving import ReceivingLink
from ringbuf import Producer
from tests.cluster.linked_rings import open_pump
from tests.cluster.long_answers import ask_long, check_exact, long_answers
from tests.cluster.subprocess_cluster import open_on_nodes
from tests.support.echo_systems import pid_of, read, wait_restarted
from tests.support.open_descriptors import open_descriptors

NODES = {"first": "a", "second": "parent"}


def lack_memory_once(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let there be no memory for the next receiving end of a link. Returns the ids of those that were to be made."""
    init, made = ReceivingLink.__init__, list[int]()

    def lacking(self: ReceivingLink, link_id: int, producer: Producer) -> None:
        made.append(link_id)
        if len(made) == 1:
            raise MemoryError
        init(self, link_id, producer)

    monkeypatch.setattr(ReceivingLink, "__init__", lacking)
    return made


async def test_a_link_without_memory_costs_its_worker_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    async with open_on_nodes(long_answers(), NODES) as cluster:
        made = lack_memory_once(monkeypatch)
        other = pid_of(cluster.omni, "second")
        os.kill(pid_of(cluster.omni, "first"), signal.SIGKILL)
        await wait_restarted(cluster.omni, "first", 3)
        assert made
        check_exact(generation := ask_long(cluster.omni), await read(generation))
        assert pid_of(cluster.omni, "second") == other


def test_an_agent_without_memory_for_a_link_lacks_its_ring_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    with open_pump() as (moving, losses):
        before = open_descriptors()
        rings = AgentRings(moving)
        lack_memory_once(monkeypatch)
        for generation in (1, 2):
            rings.make(MakeRing(generation, 4096, "in"))
        with pytest.raises(OSError, match="out of memory"):
            rings.fds(1)
        assert len(rings.fds(2)) == 3
        for generation in (1, 2):
            rings.close(CloseRing(generation, None))
        assert open_descriptors() == before
        assert not losses.all()


def fail() -> NoReturn:
    raise ZeroDivisionError("a defect")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
async def test_a_pump_that_has_failed_gets_a_successor() -> None:
    async with open_on_nodes(long_answers(), NODES) as cluster:
        failing: Pump = cluster.spawner._pump
        failing._call(lambda: setattr(failing, "_turn", fail))
        await wait_restarted(cluster.omni, "first", 2)
        [death] = cluster.omni.health().stages["first"][0].history
        assert str(death.reason).startswith("LinkLost: ")  # the agent may be the first to notice it
        check_exact(generation := ask_long(cluster.omni), await read(generation))
        assert cluster.spawner._pump is not failing
