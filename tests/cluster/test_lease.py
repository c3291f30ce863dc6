"""The lease: the parent's wait outlasts the agent's workers, however long messages take."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_actors.cluster.lease import DRIFT, KILL_S, GrantedLease, HeldLease

DELAYS = st.lists(st.tuples(st.floats(0, 30), st.floats(0, 30)), min_size=1, max_size=20)


def test_a_lease_ends_its_length_after_the_question_and_not_after_the_grant() -> None:
    lease = HeldLease(10.0)
    assert lease.is_over(0.0)
    assert lease.granted(asked_at=100.0)
    assert not lease.is_over(109.9)
    assert lease.is_over(110.0)


def test_a_grant_of_an_older_question_does_not_shorten_the_lease() -> None:
    lease = HeldLease(10.0)
    lease.granted(asked_at=100.0)
    assert not lease.granted(asked_at=95.0)
    assert lease.ends_at == 110.0


def test_a_node_that_asks_for_nothing_is_silent_and_gets_no_more_grants() -> None:
    lease = GrantedLease(10.0, now=0.0)
    assert lease.grant(9.0)
    assert not lease.is_silent(18.9)
    assert lease.is_silent(19.0)
    assert not lease.grant(19.0)
    assert lease.safe_at == pytest.approx(9.0 + 10.0 * DRIFT)


def test_the_kernel_has_time_to_end_the_workers_however_short_the_lease_is() -> None:
    assert GrantedLease(1.0, now=9.0).safe_at == 9.0 + 1.0 + KILL_S
    assert GrantedLease(20.0, now=9.0).safe_at == pytest.approx(9.0 + 20.0 * DRIFT)


def test_nothing_is_granted_once_the_node_was_given_up() -> None:
    lease = GrantedLease(10.0, now=0.0)
    lease.give_up()
    assert not lease.grant(1.0)


@given(
    delays=DELAYS,
    lease_s=st.floats(0.1, 20),
    drift=st.floats(1 / DRIFT + 1e-6, DRIFT - 1e-6),
    begin=st.floats(0, 1e6),
)
def test_the_parent_is_safe_only_when_the_agent_holds_no_lease(
    delays: list[tuple[float, float]], lease_s: float, drift: float, begin: float
) -> None:
    """Each renewal: seconds until the agent asks, and until the question arrives.

    The agent's clock begins elsewhere and runs at another speed, by less than the allowance.
    """
    granted, held = GrantedLease(lease_s, now=0.0), HeldLease(lease_s)
    asked = arrived = 0.0
    for pause_s, there_s in delays:
        asked += pause_s
        arrived = max(arrived, asked + there_s)  # messages of a connection keep their order
        if not granted.grant(arrived):
            break
        held.granted(asked_at=begin + asked / drift)  # at whatever time it comes: the end does not depend on it
    assert held.ends_at <= begin + granted.safe_at / drift + 1e-6
