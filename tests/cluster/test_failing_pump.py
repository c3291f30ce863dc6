"""Pumps that fail: an order that fails costs one worker, and a thread that fails costs its links."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NoReturn

import pytest

from omni_actors.cluster.agent_rings import AgentRings
from omni_actors.cluster.channel import Channel
from omni_actors.cluster.control import CloseRing, MakeRing
from omni_actors.cluster.link import ALIVE
from omni_actors.cluster.pump import Pump
from omni_actors.cluster.receiving import ReceivingLink
from ringbuf import Producer, Ring
from tests.cluster.linked_rings import WATCHDOG_S, open_pump
from tests.cluster.long_answers import ask_long, check_exact, long_answers
from tests.cluster.strangers import authenticated
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
async def test_a_pump_that_fails_inside_a_record_gets_a_successor(monkeypatch: pytest.MonkeyPatch) -> None:
    receive, failed = ReceivingLink._receive, list[int]()
    monkeypatch.setattr("omni_actors.cluster.receiving.READ_AHEAD", 4096)  # less than a record

    def lack_memory_once(self: ReceivingLink, buffers: Sequence[memoryview]) -> int | None:
        if self._room is not None and not failed:
            failed.append(self.link_id)
            raise MemoryError
        return receive(self, buffers)

    async with open_on_nodes(long_answers(), NODES) as cluster:
        failing: Pump = cluster.spawner._pump
        monkeypatch.setattr(ReceivingLink, "_receive", lack_memory_once)
        check_exact(generation := ask_long(cluster.omni), await read(generation))
        assert failed
        assert cluster.spawner._pump is not failing


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_link_is_closed_when_close_returns_though_its_pump_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    with open_pump() as (pump, _), Ring.create(4096) as ring:
        pump.receive(7, ring.claim_producer())
        link, failing, may_close, order = pump._links[7], threading.Event(), threading.Event(), list[str]()

        def close_late(close: Callable[[], None] = link.close) -> None:
            failing.set()
            may_close.wait(WATCHDOG_S)
            close()
            order.append("the link is closed")

        def close() -> None:
            pump.close(7)
            order.append("close has returned")

        monkeypatch.setattr(link, "close", close_late)
        pump._call(lambda: setattr(pump, "_turn", fail))
        assert failing.wait(WATCHDOG_S)
        closing = threading.Thread(target=close)
        closing.start()
        closing.join(0.2)  # it would return at once
        may_close.set()
        closing.join(WATCHDOG_S)
        assert order == ["the link is closed", "close has returned"]


def test_a_link_whose_connection_is_lost_while_it_opens_takes_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    opening, opened = ReceivingLink.open, list[int]()

    def open_and_lose(self: ReceivingLink, channel: Channel) -> None:
        opening(self, channel)
        opened.append(self.link_id)
        if len(opened) == 1:
            raise ConnectionResetError

    monkeypatch.setattr(ReceivingLink, "open", open_and_lose)
    with open_pump() as (pump, losses), Ring.create(4096) as ring:
        pump.receive(7, ring.claim_producer())
        for _ in range(2):
            connection, heard = authenticated(pump.address, 7)[0], b""
            with connection, suppress(ConnectionResetError):
                heard = connection.recv(1)
        assert losses.next()[0] == 7  # the second connection has ended
        assert heard == ALIVE
        assert opened == [7, 7]
        pump.close(7)


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
