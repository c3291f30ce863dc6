"""The rule of ``autoscale``, in a simulated queue: how fast it follows a load, and that it does not flap."""

from __future__ import annotations

import itertools
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omni_actors.config import Autoscale
from omni_actors.system.autoscale_rule import (
    DOWN_UTILIZATION,
    FORGET_WINDOWS,
    INTERVAL_S,
    LOAD_S,
    AutoscaleRule,
    Demand,
)
from tests.support.queueing import Run, bursts, poisson, simulate

LOAD_TIME_S = 20.0
BOUNDS = Autoscale(min=1, max=16)
DECIDED_S = BOUNDS.queue_time_s + 2 * INTERVAL_S
"""From the first request that queues to the decision."""


def regular(rate: float, start: float, end: float) -> list[float]:
    """Arrivals at equal distances."""
    return [start + n / rate for n in range(int((end - start) * rate))]


def run_poisson(load: float, service_s: float, concurrency: int, seed: int, *, end: float = 2000.0) -> Run:
    """Offer a load from 60 s on, with times of service that vary as much as the intervals between arrivals."""
    draw = random.Random(seed)
    arrivals = list(poisson(draw, load / service_s, 60.0, end))
    service = lambda: draw.expovariate(1 / service_s)  # noqa: E731
    return simulate(BOUNDS, arrivals, service, until=end + 700.0, load_s=LOAD_TIME_S, concurrency=concurrency)


@settings(deadline=None, max_examples=15)
@given(
    load=st.floats(0.2, 9.0), service_s=st.sampled_from((0.3, 1.0, 2.0, 4.0)), concurrency=st.sampled_from((1, 2, 4, 8))
)
@pytest.mark.slow
def test_a_steady_load_of_any_level_changes_the_number_once_at_most(
    load: float, service_s: float, concurrency: int
) -> None:
    """After settling, which takes two stabilization windows at most."""
    arrivals = regular(load * concurrency / service_s, 60.0, 1800.0)
    run = simulate(BOUNDS, arrivals, lambda: service_s, until=1800.0, concurrency=concurrency)
    settled = 60.0 + 2 * BOUNDS.down_after_s
    assert len(run.changes_within(settled, 1800.0)) <= 1, run.changes
    assert run.wanted(1790.0) * concurrency >= load * concurrency - 1e-6, "it serves the load"
    assert run.wanted(1790.0) <= math.ceil(load / DOWN_UTILIZATION) + 1, "with few replicas more than it needs"


@pytest.mark.slow
def test_random_arrivals_and_services_seldom_change_the_number() -> None:
    """Twenty minutes of steady load each: most of them without any change. Too many replicas leave one by one."""
    counts = [
        len(run_poisson(load * concurrency, service_s, concurrency, seed).changes_within(800.0, 2000.0))
        for load, service_s, concurrency, seed in itertools.product((0.5, 1.4, 3.2), (0.5, 2.0), (1, 4), (0, 1))
    ]
    assert max(counts) <= 5, counts
    assert counts.count(0) > len(counts) / 2, counts


@pytest.mark.parametrize("load", [3.0, 7.0, 11.0])
def test_it_reaches_what_a_sudden_load_needs_in_one_decision_and_one_load(load: float) -> None:
    """The time of service is known from a small load before. Regular arrivals, of which none is lost in chance."""
    service_s, concurrency, began = 2.0, 4, 300.0
    small = regular(0.5 * concurrency / service_s, 0.0, began)
    arrivals = small + regular(load * concurrency / service_s, began, 900.0)
    run = simulate(BOUNDS, arrivals, lambda: service_s, until=900.0, concurrency=concurrency, load_s=LOAD_TIME_S)
    queues_from = began + service_s  # the replica's places are taken within that time
    assert run.wanted(queues_from + DECIDED_S) >= load, run.changes
    late = [wait for at, wait in run.waits if at > queues_from + DECIDED_S + 10 * LOAD_TIME_S]
    assert max(late) <= BOUNDS.queue_time_s, "the queue has been worked off"


@pytest.mark.parametrize("seed", range(3))
def test_it_scales_down_within_the_window_and_the_time_over_which_arrivals_count(seed: int) -> None:
    run = run_poisson(12.0, 2.0, 4, seed, end=1000.0)
    assert run.wanted(1000.0) > 3
    assert not run.changes_within(1000.0, 1000.0 + BOUNDS.down_after_s - 60.0), "a lull removes nothing"
    assert run.wanted(1000.0 + BOUNDS.down_after_s + LOAD_S + 20.0) == BOUNDS.min


def test_a_load_that_returns_while_replicas_drain_gets_them_back_at_once() -> None:
    """Requests of 100 s: when the load falls, the replicas that are removed have some left for a while."""
    bounds, load_s, back = Autoscale(min=1, max=16, down_after_s=60.0), 60.0, 850.0
    arrivals = regular(0.4, 0.0, 700.0) + regular(0.12, 700.0, back) + regular(0.4, back, 1300.0)
    run = simulate(bounds, arrivals, lambda: 100.0, until=1300.0, load_s=load_s, concurrency=8)
    assert run.taken_back == 2, run.changes
    up = [time for time, number in run.changes_within(back, 1300.0) if number > run.wanted(time - INTERVAL_S)]
    assert up[2] - up[0] < load_s, "two changes in turn, without any load"


def test_bursts_more_frequent_than_the_window_keep_their_replicas() -> None:
    run = simulate(BOUNDS, list(bursts(12, 60.0, 60.0, 3000.0)), lambda: 4.0, until=3000.0)
    assert len(run.changes_within(600.0, 3000.0)) <= 1, run.changes


@settings(deadline=None, max_examples=100)
@given(
    facts=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40), st.integers(0, 20)), max_size=80),
    least=st.integers(0, 3),
    more=st.integers(0, 5),
)
def test_the_number_never_leaves_its_bounds(facts: list[tuple[int, int, int]], least: int, more: int) -> None:
    bounds = Autoscale(min=least, max=max(1, least + more), down_after_s=5.0)
    rule, now, arrived, since, wanted = AutoscaleRule(bounds, 2), 0.0, 0, list[float](), least
    for coming, ending, ready in facts:
        now += INTERVAL_S
        arrived += coming
        since = [*since[ending:], *[now] * coming]
        wanted = rule.decide(Demand(now, arrived, since, wanted, min(ready, wanted)))
        assert bounds.min <= wanted <= bounds.max


def test_a_stage_without_replicas_gets_one_with_its_first_request_and_loses_it_without_any() -> None:
    bounds = Autoscale(min=0, max=4, down_after_s=30.0)
    run = simulate(bounds, [100.0, 101.0], lambda: 1.0, until=400.0, replicas=0)
    assert run.changes[1] == (100.5, 1), "it does not wait for queue_time_s"
    assert run.changes[-1][1] == 0
    assert 130.0 <= run.changes[-1][0] <= 100.0 + LOAD_TIME_S + LOAD_S + 30.0 + 5.0


def test_it_removes_no_replica_that_the_same_load_would_add_again() -> None:
    """One replica at 55% has spare room, but requests come in pairs, and the second one queues too long."""
    pairs = [at for at in regular(0.1, 60.0, 4000.0) for _ in range(2)]
    run = simulate(BOUNDS, pairs, lambda: 2.75, until=4000.0)
    assert run.wanted(4000.0) == 2
    assert not run.changes_within(60.0 + 2 * BOUNDS.down_after_s, 4000.0), run.changes


def test_a_pause_is_not_counted_as_service() -> None:
    """Before and after it, a request of 0.9 s every 2 s fits one replica. Five wait when a pause of a minute begins."""
    rule, wanted, paused, resumed = AutoscaleRule(BOUNDS, 4), 1, 301.0, 361.0
    waiting = [300.9] * 5
    for step in range(int(600 / INTERVAL_S)):
        now = step * INTERVAL_S
        if paused <= now < resumed:
            rule.hold(now)
            continue
        came = [at for at in regular(0.5, 0.0, 600.0) if at <= now and not paused <= at < resumed]
        since = [at for at in came if now < at + 0.9] + (waiting if 300.9 <= now < resumed + 0.9 else [])
        arrived = len(came) + (len(waiting) if now >= 300.9 else 0)
        wanted = rule.decide(Demand(now, arrived, sorted(since), wanted, wanted))
        assert wanted == 1, now


@pytest.mark.parametrize(("concurrency", "service_s", "load"), [(8, 1.0, 3.0), (1, 8.0, 0.5)])
def test_one_burst_out_of_quiet_keeps_no_replica_for_ever(concurrency: int, service_s: float, load: float) -> None:
    """One replica serves the load that follows without a queue. The average load at the burst is far below it."""
    burst = [600.0 + n / 100 for n in range(3 * concurrency)]
    end = 700.0 + (FORGET_WINDOWS + 3) * BOUNDS.down_after_s
    arrivals = regular(0.01, 0.0, 600.0) + burst + regular(load / service_s, 700.0, end)
    run = simulate(BOUNDS, arrivals, lambda: service_s, until=end, load_s=LOAD_TIME_S, concurrency=concurrency)
    assert max(number for _, number in run.changes) > 1, run.changes
    assert run.wanted(end) == 1, run.changes
    soon = 700.0 + 2 * BOUNDS.down_after_s
    assert concurrency == 1 or run.wanted(soon) == 1, "the burst itself was measured"
    assert len(run.changes_within(soon, end)) <= 1


def test_a_number_that_others_have_raised_is_kept_for_a_window() -> None:
    rule, wanted, raised = AutoscaleRule(BOUNDS, 4), 1, 1000.0
    for step in range(int(2000.0 / INTERVAL_S)):
        now = step * INTERVAL_S
        if now == raised:
            wanted = 3
        wanted = rule.decide(Demand(now, 0, [], wanted, wanted))
        assert wanted == (3 if raised <= now <= raised + BOUNDS.down_after_s else 1), now
