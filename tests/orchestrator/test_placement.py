"""What a stage's replicas say of it: which of them are standbys, and whether it is congested, failed or soon back."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import trio
import trio.testing

from omni_actors.config import Stage
from omni_actors.orchestrator.placement import Placement
from omni_actors.protocol.messages import Address, Bounds, WorkerSpec
from omni_actors.stages.base import NEXT_END
from omni_actors.supervisor.incarnation import Incarnation, IncarnationEvent
from omni_actors.supervisor.replica import Replica, ReplicaState

STAGE = Stage(engine="echo")


def added(
    placement: Placement, number: int, *, ready_at: float | None = None, congested: bool = False, **fields: Any
) -> Replica:
    """Add a replica of ``mind``, whose worker became ready at ``ready_at``, or loads."""
    spec = WorkerSpec(address=Address("mind", number), factory="", bounds=Bounds(0, 0))
    replica = Replica(spec, STAGE, incarnation=Incarnation(), **fields)
    replica.incarnation.worker = cast(Any, SimpleNamespace(mailbox=SimpleNamespace(congested=congested)))
    if ready_at is not None:
        replica.incarnation.advance(IncarnationEvent.READY)
        replica.incarnation.ready_at = ready_at
    placement.add(replica)
    return replica


@pytest.mark.parametrize(
    ("ready_at", "wanted", "load", "reserved", "is_standby"),
    [
        pytest.param(2.0, 1, 0, None, True, id="another one was ready earlier"),
        pytest.param(None, 1, 0, None, True, id="it loads and another one serves"),
        pytest.param(0.5, 1, 0, None, False, id="it was ready earlier"),
        pytest.param(2.0, 2, 0, None, False, id="both are wanted"),
        pytest.param(2.0, 1, 1, None, False, id="it holds a request"),
        pytest.param(2.0, 1, 0, 1, False, id="it is on trial"),
        pytest.param(2.0, 1, 0, 0, False, id="the other one is on trial"),
    ],
)
def test_a_replica_that_served_no_requests_was_a_standby(
    ready_at: float | None, wanted: int, load: int, reserved: int | None, is_standby: bool
) -> None:
    placement = Placement(reserved={Address("mind", reserved)} if reserved is not None else set())
    placement.wanted["mind"] = wanted
    added(placement, 0, ready_at=1.0)
    died = added(placement, 1, ready_at=ready_at)
    placement.loads[died.address] = load
    assert placement.was_standby(died) is is_standby


@pytest.mark.parametrize(
    ("congested", "stage"),
    [((True, True, False), "mind"), ((True, False, True), None), ((False, True, True), None)],
)
def test_a_stage_is_congested_when_all_are_that_serve(congested: tuple[bool, ...], stage: str | None) -> None:
    placement = Placement(reserved=())
    placement.wanted["mind"] = 2
    for number, is_congested in enumerate(congested):
        added(placement, number, ready_at=float(number), congested=is_congested)
    assert placement.congested(["other", "mind"]) == stage
    placement.wanted["mind"] = 0
    assert placement.congested(["mind"]) is None, "none gets requests"


def test_a_stage_has_failed_when_all_replicas_that_stay_were_given_up() -> None:
    placement = Placement(reserved=())
    assert not placement.has_failed("mind")
    leaving = added(placement, 0, ready_at=0.0, leaving=True)
    assert not placement.has_failed("mind"), "none stays"
    added(placement, 1, state=ReplicaState.FAILED)
    assert placement.has_failed("mind")
    leaving.leaving = False
    assert not placement.has_failed("mind")


async def test_a_failed_stage_is_back_after_the_next_try_has_loaded(autojump_clock: trio.testing.MockClock) -> None:
    await trio.sleep(100.0)
    placement = Placement(reserved=())
    assert placement.back_in_s("mind") is None
    added(placement, 0, state=ReplicaState.FAILED)
    added(placement, 1, state=ReplicaState.FAILED, retry_at=101.0, load_s=1.0, leaving=True)
    assert placement.back_in_s("mind") is None, "one is not tried again, one is being removed"
    for number, retry_at, load_s, back_in_s in ((2, 130.0, None, 30.0), (3, 120.0, 4.0, 24.0), (4, 90.0, 6.0, 6.0)):
        added(placement, number, state=ReplicaState.FAILED, retry_at=retry_at, load_s=load_s)
        assert placement.back_in_s("mind") == back_in_s


async def test_the_next_end_is_the_earliest_that_an_engine_measured(autojump_clock: trio.testing.MockClock) -> None:
    await trio.sleep(100.0)
    placement = Placement(reserved=())
    added(placement, 0, ready_at=1.0)
    assert placement.next_ends_s() == {}
    for number, asked_at, seconds, found in (
        (1, 90.0, 10.0, {}),  # it has ended
        (2, 98.0, 7.0, {"mind": 5.0}),
        (3, 99.0, 3.0, {"mind": 2.0}),
        (4, 99.0, 9.0, {"mind": 2.0}),
    ):
        replica = added(placement, number, ready_at=1.0)
        replica.incarnation.last_pong_at, replica.incarnation.gauges = asked_at, {NEXT_END: seconds}
        assert placement.next_ends_s() == found
