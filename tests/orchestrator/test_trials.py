"""Trials on plain data: there are no workers, and time is a number."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_actors.config import Limits
from omni_actors.errors import WorkerExit
from omni_actors.orchestrator.pieces import Input
from omni_actors.orchestrator.replay_state import StageState
from omni_actors.orchestrator.request import Request
from omni_actors.orchestrator.routes import Route
from omni_actors.orchestrator.trials import (
    CULPRIT_WAIT_S,
    GROUP_WAIT_S,
    PROBATION_S,
    REPLICA_DRAIN_S,
    STAGE_QUIET_S,
    Trials,
    died_by_itself,
)
from omni_actors.protocol.messages import CLIENT, Address
from omni_actors.stress.judge import max_deaths_by_one_request

STAGE = "s"
WORKER = Address(STAGE, 0)
ROUTE = Route((STAGE,), {}, {STAGE: (CLIENT,)}, {})


def request(number: int | None, text: str | None = None) -> Request:
    inputs = {"script": [Input({"text": text or f"text {number}"})]}
    return Request(
        name=f"r{number}",
        route=ROUTE,
        inputs=inputs,
        params={STAGE: msgspec.Raw(b"\x80")},
        deadline_s=1.0,
        submitted=0.0,
        number=number,
    )


class Stage:
    """A stage with one replica that dies whenever a poison request runs on it. It drives the trials."""

    def __init__(self, poison: set[Request], *, limit: int = 2) -> None:
        self.trials, self.poison, self.limit = Trials(), poison, limit
        self.deaths, self.now = 0, 0.0
        self.done: list[Request] = []
        self.ended: list[Request] = []

    def die(self, unfinished: Sequence[Request], failed: Request | None = None) -> bool:
        self.deaths += 1
        counts = self.trials.worker_died(WORKER, unfinished, failed, self.now)
        for each in unfinished:
            if max(each.deaths.charges().values(), default=-1) >= self.limit:
                self.ended += [each, *self.trials.requests_of_unit(each)]
                for other in self.trials.requests_of_unit(each):
                    self.trials.drop(other)
                self.trials.drop(each)
            each.deaths.restarted([STAGE])
        return counts

    def run(self) -> None:
        """Try group after group until no suspect is left."""
        while self.trials:
            group = self.trials.next(STAGE, self.now, is_unused=True, others_wait=False)
            if group is None:
                self.now = self.trials.next_time(self.now)
                assert self.now < math.inf, "suspects wait and no time is set at which they are tried"
                continue
            tried = group.candidates
            self.trials.begin(group, WORKER, self.now)
            if self.poison & set(tried):
                self.die(tried)
            else:
                for each in tried:
                    self.done += [each, *self.trials.requests_of_unit(each)]
                    self.trials.clear(each)


def test_only_the_request_for_which_the_engine_raised_is_a_suspect() -> None:
    requests = [request(number) for number in range(6)]
    stage = Stage({requests[3]})
    assert stage.die(requests, failed=requests[3])
    assert [each.number for each in requests if each in stage.trials.group_of] == [3]
    stage.run()
    assert (stage.deaths, stage.ended, stage.done) == (3, [requests[3]], [])


@pytest.mark.parametrize("place", range(6))
def test_the_culprit_among_six_is_found_in_few_deaths_and_others_lose_no_replay(place: int) -> None:
    requests = [request(number) for number in range(6)]
    stage = Stage({requests[place]})
    stage.die(requests)
    stage.run()
    assert stage.ended == [requests[place]]
    assert stage.deaths <= 4
    innocent = [each for each in requests if each is not requests[place]]
    assert sorted(stage.done, key=lambda each: each.number or 0) == innocent
    assert not any(each.deaths.charged for each in innocent)


def test_requests_with_one_fingerprint_are_tried_once() -> None:
    """Fifty clients send the same poison. The other eight requests are tried first and are in one death only."""
    poison = [request(number, "poison") for number in range(50)]
    others = [request(number) for number in range(50, 58)]
    stage = Stage(set(poison))
    stage.die([*poison, *others])
    first = stage.trials.next(STAGE, 0.0, is_unused=True, others_wait=False)
    assert first is not None
    assert set(first.requests) == set(others)
    stage.run()
    assert (stage.deaths, set(stage.ended), set(stage.done)) == (3, set(poison), set(others))


@given(st.lists(st.booleans(), min_size=1, max_size=24), st.integers(0, 3))
def test_every_culprit_is_found_and_no_other_request_is_charged(guilty: list[bool], limit: int) -> None:
    requests = [request(number) for number in range(len(guilty))]
    poison = {each for each, is_guilty in zip(requests, guilty, strict=True) if is_guilty}
    stage = Stage(poison, limit=limit)
    if poison:
        stage.die(requests)
        stage.run()
        assert set(stage.ended) == poison
        assert set(stage.done) == set(requests) - poison
        assert not any(each.deaths.charged for each in stage.done)
        assert stage.deaths <= 1 + len(poison) * (limit + 1 + math.log2(len(requests)) * 2)


def test_only_the_first_death_of_a_request_counts_against_the_intensity() -> None:
    culprit, other = request(1), request(2)
    stage = Stage({culprit}, limit=5)
    assert stage.die([culprit])
    assert not stage.die([culprit])
    assert stage.die([culprit, other]), "the other request may have caused it"
    assert stage.trials.worker_died(WORKER, [], None, 0.0), "no request can have caused it"


def test_a_culprit_waits_for_a_quiet_stage() -> None:
    culprit, other = request(1), request(2)
    stage = Stage({culprit})
    trials = stage.trials
    stage.die([culprit], failed=culprit)
    trials.note_use(STAGE, other, 10.0)
    assert trials.next(STAGE, 10.5, is_unused=True, others_wait=False) is None
    assert trials.next_time(10.5) == 10.0 + STAGE_QUIET_S
    assert trials.next(STAGE, 12.0, is_unused=True, others_wait=True) is None
    assert trials.next(STAGE, 12.0, is_unused=False, others_wait=False) is None
    assert trials.next(STAGE, CULPRIT_WAIT_S, is_unused=False, others_wait=True) is stage.trials.group_of[culprit]


def test_a_culprit_that_finds_no_quiet_moment_gets_a_drained_replica() -> None:
    culprit, other = request(1), request(2)
    trials = Stage({culprit}).trials
    trials.worker_died(WORKER, [culprit, other], culprit, 0.0)
    group = trials.next(STAGE, CULPRIT_WAIT_S, is_unused=False, others_wait=True)
    assert group is not None
    trials.drain(group, WORKER, CULPRIT_WAIT_S)
    assert trials.draining(STAGE) is trials.running[WORKER] is group
    assert trials.next_time(CULPRIT_WAIT_S) == CULPRIT_WAIT_S + REPLICA_DRAIN_S
    trials.end_drain(group, CULPRIT_WAIT_S + REPLICA_DRAIN_S)
    assert (trials.running, trials.draining(STAGE)) == ({}, None)
    later = 2 * CULPRIT_WAIT_S + REPLICA_DRAIN_S
    assert trials.next(STAGE, later, is_unused=False, others_wait=True) is None, "it waits twice as long"
    assert trials.next(STAGE, later + CULPRIT_WAIT_S, is_unused=False, others_wait=True) is group


def test_a_culprit_with_two_deaths_gets_no_drained_replica() -> None:
    culprit, other = request(1), request(2)
    trials = Stage({culprit}).trials
    for _ in range(2):
        trials.worker_died(WORKER, [culprit, other], culprit, 0.0)
    assert trials.exhausted(STAGE, CULPRIT_WAIT_S - 1.0) == []
    assert trials.next(STAGE, CULPRIT_WAIT_S, is_unused=False, others_wait=True) is None
    assert trials.exhausted(STAGE, CULPRIT_WAIT_S) == trials.waiting(STAGE)


def test_requests_with_the_fingerprint_of_the_blamed_one_share_its_deaths() -> None:
    blamed, alike, elsewhere, other = request(1, "x"), request(2, "x"), request(3, "x"), request(4)
    trials = Stage({blamed}).trials
    assert trials.worker_died(WORKER, [blamed, alike, other], blamed, 0.0)
    assert not trials.worker_died(Address(STAGE, 1), [elsewhere], elsewhere, 0.0)
    assert {each.deaths.suspected for each in (blamed, alike, elsewhere)} == {2}
    assert len(trials.groups) == 1
    assert other not in trials.group_of


def test_a_culprit_without_other_requests_is_tried_at_once() -> None:
    culprit = request(1)
    stage = Stage({culprit})
    stage.trials.note_use(STAGE, culprit, 0.0)
    stage.die([culprit])
    assert stage.trials.next(STAGE, 0.0, is_unused=True, others_wait=False) is stage.trials.group_of[culprit]


def test_the_probation_doubles_with_each_death() -> None:
    late = [request(1), request(2)]
    trials = Trials()
    for often in range(3):
        trials.worker_died(WORKER, late, None, 0.0)
        group = trials.next(STAGE, 0.0, is_unused=True, others_wait=False)
        assert group is not None
        trials.begin(group, WORKER, 0.0)
        assert not trials.clear_expired(lambda _, often=often: PROBATION_S * 2.0**often - 0.1)
        assert trials.next_time(100.0) < 101.0, "its worker has not answered a ping since, so it is checked again"
        assert trials.clear_expired(lambda _, often=often: PROBATION_S * 2.0**often)
        for each in late:
            trials.drop(each)


def test_when_a_suspect_leaves_the_others_are_not_known_to_hold_the_culprit() -> None:
    """The suspect that left may have been the culprit, so the other one is not charged by elimination."""
    gone, left = request(1), request(2)
    stage = Stage(set())
    stage.die([gone, left])
    stage.trials.drop(gone)
    group = stage.trials.group_of.get(left)
    assert group is not None
    assert not group.is_culprit
    stage.run()
    assert stage.done == [left]


@pytest.mark.parametrize("place", range(8))
def test_a_suspect_that_leaves_costs_no_further_death(place: int) -> None:
    """The client of one suspect leaves during the reload; the others are tried in halves as if it had not."""
    requests = [request(number) for number in range(9)]
    stage = Stage({requests[place]})
    stage.die(requests)
    stage.trials.drop(requests[8])
    stage.run()
    assert stage.ended == [requests[place]]
    assert stage.deaths <= 1 + math.log2(8)


def test_a_half_whose_suspect_leaves_on_trial_leaves_the_other_half_halved() -> None:
    requests = [request(number) for number in range(6)]
    stage = Stage(set())
    stage.die(requests)
    half = stage.trials.next(STAGE, 0.0, is_unused=True, others_wait=False)
    assert half is not None
    stage.trials.begin(half, WORKER, 0.0)
    stage.trials.drop(half.candidates[0])
    others = [each for each in stage.trials.groups if each is not half]
    assert sorted(len(each.units) for each in others) == [1, 2]
    assert not any(each.has_culprit for each in stage.trials.groups)


def test_a_group_waits_for_an_unused_replica_since_the_reload() -> None:
    """Beside other requests, a death would not tell which of them all had caused it."""
    trials = Trials()
    trials.worker_died(WORKER, [request(1), request(2)], None, 0.0)
    trials.serving_since[STAGE] = 60.0
    assert trials.next(STAGE, 60.0, is_unused=False, others_wait=True) is None
    assert trials.next_time(60.0) == 60.0 + GROUP_WAIT_S
    assert trials.next(STAGE, 60.0 + GROUP_WAIT_S, is_unused=False, others_wait=True) is not None


def test_a_trial_beside_another_request_costs_one_more_death() -> None:
    """The bound of the fault harness has a term for it (``stress.judge.max_deaths_by_one_request``)."""
    culprit, *others, late = (request(number) for number in range(5))
    stage = Stage({culprit})
    trials = stage.trials
    stage.die([culprit, *others])
    half = trials.next(STAGE, 0.0, is_unused=True, others_wait=False)
    assert half is trials.group_of[culprit]
    trials.begin(half, WORKER, 0.0)
    stage.die(half.candidates)
    for each in others[1:]:
        trials.clear(each)
    quarter = trials.next(STAGE, GROUP_WAIT_S, is_unused=False, others_wait=True)
    assert quarter is not None
    assert quarter.candidates == [culprit]
    trials.begin(quarter, WORKER, GROUP_WAIT_S, alone=False)
    stage.die([culprit, late])
    assert stage.ended == [], "either of them may have ended the worker"
    stage.run()
    assert (stage.ended, late in stage.done) == ([culprit], True)
    limits = Limits(max_requests=4, replays=stage.limit)
    assert stage.deaths == max_deaths_by_one_request(limits, "replay") == 4


def test_when_the_tried_request_leaves_another_one_of_its_unit_is_tried() -> None:
    first, second = request(1, "alike"), request(2, "alike")
    trials = Trials()
    trials.worker_died(WORKER, [first, second], None, 0.0)
    group = trials.next(STAGE, 0.0, is_unused=True, others_wait=False)
    assert group is not None
    trials.begin(group, WORKER, 0.0)
    trials.drop(group.candidates[0])
    assert trials.running == {}
    assert trials.next(STAGE, 100.0, is_unused=True, others_wait=False) is group


def test_a_new_request_joins_the_unit_of_its_fingerprint() -> None:
    suspect, alike, other = request(1, "alike"), request(2, "alike"), request(3)
    trials = Trials()
    trials.worker_died(WORKER, [suspect], None, 0.0)
    assert trials.join(alike)
    assert not trials.join(other)
    assert trials.requests_of_unit(suspect) == [alike]


def test_a_unit_that_goes_to_another_stage_leaves_no_known_culprit_behind() -> None:
    """It may have been the culprit, so the other request is not charged by elimination."""
    suspect, other, alike = request(1, "alike"), request(2), request(None, "alike")
    trials = Trials()
    trials.worker_died(WORKER, [suspect, other], None, 0.0)
    trials.join(alike)
    elsewhere = Address("another", 0)
    alike.replay_state.stages["another"] = StageState()
    trials.worker_died(elsewhere, [suspect], suspect, 0.0)
    assert trials.group_of[alike] is trials.group_of[suspect]
    assert trials.group_of[suspect].is_culprit
    assert not trials.group_of[other].has_culprit


def test_a_death_on_trial_may_have_its_cause_in_a_request_that_left_for_another_stage() -> None:
    """Its worker still works on that request, so the death is not charged to the one that stayed."""
    leaves, stays = request(1), request(2)
    trials = Trials()
    trials.worker_died(WORKER, [leaves, stays], None, 0.0)
    trials.begin(trials.group_of[stays], WORKER, 0.0, alone=True)
    leaves.replay_state.stages["another"] = StageState()
    trials.worker_died(Address("another", 0), [leaves], leaves, 0.0)
    trials.worker_died(WORKER, [leaves, stays], None, 0.0)
    assert not stays.deaths.to_charge
    assert trials.group_of[stays] is trials.group_of[leaves]
    assert set(trials.group_of[stays].units) == {leaves.fingerprint, stays.fingerprint}


@pytest.mark.parametrize(
    ("exit", "by_itself"),
    [
        (WorkerExit(1, None, 1), True),
        (WorkerExit(1, None, 0), True),
        (WorkerExit(1, "SIGSEGV", None), True),
        (WorkerExit(1, "SIGKILL", None, reason="no progress for 30 s (step_timeout_s)"), True),
        (WorkerExit(1, "SIGKILL", None), False),
        (WorkerExit(1, "SIGTERM", None), False),
        (WorkerExit(1, "SIGKILL", None, reason="NodeLost: b: its lease ended"), False),
        (WorkerExit(1, "SIGKILL", None, reason="LinkLost: no message for 20 s"), False),
    ],
)
def test_a_signal_from_another_process_makes_no_suspects(exit: WorkerExit, by_itself: bool) -> None:
    assert died_by_itself(exit) is by_itself
