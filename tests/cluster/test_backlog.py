"""How many control messages wait for a worker on another node: the counts, and the system that holds requests back."""

from __future__ import annotations

import collections

import psutil
import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st

from omni_actors.cluster.backlog import REPORTS, Backlog, BacklogReports
from omni_actors.config import Pipeline
from omni_actors.errors import Overloaded
from omni_actors.protocol.messages import Abort, Address, ControlMessage
from omni_actors.stress.simulation.network import Network
from omni_actors.stress.simulation.remote_worker import RemoteWorker
from omni_actors.stress.simulation.worker import SimulatedWorker, WorkerBehavior
from omni_actors.system import OmniSystem
from tests.cluster.subprocess_cluster import open_on_nodes
from tests.support.echo_systems import WATCHDOG_S, ask, one_stage, read

CAPACITY = 48


class Nodes:
    """A parent, a node, and what is under way between them."""

    def __init__(self) -> None:
        self.backlog = Backlog(CAPACITY)
        self.to_agent = self.unread = 0
        self.to_parent = collections.deque[int]()
        self._reports = BacklogReports(CAPACITY, waiting=lambda: self.unread, report=self.to_parent.append)

    def post(self) -> None:
        self.backlog.on_posted()
        self.to_agent += 1

    def deliver(self) -> None:
        if self.to_agent:
            self.to_agent -= 1
            self.unread += 1
            assert self.unread <= CAPACITY, "the mailbox is full"
            self._reports.on_delivered()

    def take(self) -> None:
        if self.unread:
            self.unread -= 1
            self._reports.on_taken()

    def report(self) -> None:
        if self.to_parent:
            self.backlog.on_taken(self.to_parent.popleft())


@given(st.lists(st.sampled_from(["post", "deliver", "take", "report"]), max_size=400))
def test_a_mailbox_is_never_full_before_the_parent_knows_and_the_parent_knows_once_it_was_read(acts: list[str]) -> None:
    nodes = Nodes()
    for act in acts:
        if act != "post" or not nodes.backlog.full:
            getattr(nodes, act)()
        assert nodes.backlog.congested or 2 * (nodes.to_agent + nodes.unread) < CAPACITY
    for act in ("deliver", "take", "report"):
        for _ in range(len(acts)):
            getattr(nodes, act)()
    assert not nodes.backlog.congested
    room = 0
    while not nodes.backlog.full:
        nodes.post()
        room += 1
    assert room > CAPACITY - CAPACITY // REPORTS


async def test_a_simulated_parent_learns_a_delay_later_what_a_worker_has_read(
    autojump_clock: trio.testing.MockClock,
) -> None:
    delay_s, network = 0.05, Network(0.05)

    class Connection:
        def to_agent(self, act) -> None:  # type: ignore[no-untyped-def]
            network.send("parent", "a", act)

        def to_parent(self, act) -> None:  # type: ignore[no-untyped-def]
            network.send("a", "parent", act)

        def descriptors(self, generation: int) -> tuple[int, ...]:
            return ()

    process = SimulatedWorker(Address("s", 0), 1, WorkerBehavior(), CAPACITY, lambda text: None)
    worker = RemoteWorker(process, CAPACITY, Connection(), lambda address, message: None)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(network.run)
        for number in range(CAPACITY // 2):
            assert not worker.congested
            worker.post(Abort(number))
        assert worker.congested
        await trio.sleep(1.5 * delay_s)
        seen: list[ControlMessage] = [(await process._next())[0] for _ in range(CAPACITY // 2)]
        assert seen == [Abort(number) for number in range(CAPACITY // 2)]
        assert worker.congested, "the report is under way"
        await trio.sleep(1.5 * delay_s)
        assert not worker.congested
        nursery.cancel_scope.cancel()
    process.kill()
    process.free()


def refused(omni: OmniSystem) -> Overloaded | None:
    """Return why one more request is refused, if it is. It ends at once, but leaves control messages."""
    try:
        ask(omni).abort()
    except Overloaded as error:
        return error
    return None


@pytest.mark.parametrize("stops", ["only", "one of two"])
async def test_a_worker_on_another_node_that_reads_no_control_messages_gets_no_requests_and_lives(stops: str) -> None:
    alone = stops == "only"
    pipeline: Pipeline = one_stage(replicas=1 if alone else 2)
    async with open_on_nodes(pipeline, {"only": "a"}) as running:
        omni = running.omni
        first = min(omni._supervisor.replicas.values(), key=lambda replica: replica.incarnation.ready_at)
        assert first.worker is not None
        assert first.worker.node == "a"
        stopped = psutil.Process(first.worker.pid)
        stopped.suspend()
        with trio.fail_after(WATCHDOG_S):
            while not first.congested:
                refused(omni)  # a second replica may be congested, too
                await trio.lowlevel.checkpoint()
            if alone:
                error = refused(omni)
                assert error is not None
                assert error.stage == "only"
                stopped.resume()
            while refused(omni) is not None:  # noqa: ASYNC110 - there is no event for it
                await trio.sleep(0.005)
        assert len(await read(ask(omni))) == 1
        stopped.resume()
        assert not any(replica.history for stage in omni.health().stages.values() for replica in stage)
