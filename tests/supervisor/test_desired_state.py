"""The order of the parts of the desired state, and taking a change back."""

from __future__ import annotations

import pytest

from omni_actors.errors import InvalidRequest, WorkerLost
from omni_actors.protocol.messages import Address
from omni_actors.supervisor.calls import MAX_CALLS, PendingCall, Reply
from omni_actors.supervisor.desired_state import LARGEST_DESIRED, DesiredState, _values
from omni_actors.supervisor.incarnation import Incarnation


def values(state: DesiredState) -> list[int]:
    return [part.desired.arguments["value"] for part in state.parts("stage")]


def test_a_part_that_is_set_again_comes_last() -> None:
    state = DesiredState()
    for key, value in (("a", 1), ("b", 2), ("a", 3)):
        state.set("stage", "weights", {"value": value}, key)
    assert values(state) == [2, 3]


def test_a_change_that_is_taken_back_leaves_value_and_place_as_they_were() -> None:
    state = DesiredState()
    state.set("stage", "weights", {"value": 1}, "a")
    state.set("stage", "weights", {"value": 2}, "b")
    part = state.set("stage", "weights", {"value": 3}, "a")
    state.set("stage", "adapters", {"value": 4})
    state.take_back(part)
    assert values(state) == [1, 2, 4]
    state.take_back(part)
    assert values(state) == [1, 2, 4]


def test_a_part_that_was_set_again_later_stays_behind_those_that_are_taken_back() -> None:
    state = DesiredState()
    state.set("stage", "weights", {"value": 1}, "a")
    state.set("stage", "weights", {"value": 2}, "b")
    added = state.set("stage", "weights", {"value": 3}, "c")
    changed = state.set("stage", "weights", {"value": 4}, "b")
    state.set("stage", "weights", {"value": 5}, "a")
    state.take_back(added)
    assert values(state) == [4, 5]
    state.take_back(changed)
    assert values(state) == [2, 5]


def test_what_was_set_anew_or_dropped_meanwhile_is_not_taken_back() -> None:
    state = DesiredState()
    state.set("stage", "weights", {"value": 1}, "a")
    state.set("stage", "weights", {"value": 2}, "b")
    part = state.set("stage", "weights", {"value": 3}, "a")
    state.drop("stage", "weights", "b")
    newer = state.set("stage", "weights", {"value": 4}, "a")
    state.take_back(part)
    assert values(state) == [4]
    state.take_back(newer)
    assert values(state) == [1], "3 was taken back, too"
    dropped = state.set("stage", "weights", {"value": 5}, "a")
    state.drop("stage", "weights", "a")
    state.take_back(dropped)
    assert values(state) == []


def test_a_part_that_replaces_those_with_other_keys_stays_with_other_capabilities() -> None:
    state = DesiredState()
    for value, (capability, key) in enumerate([("weights", "a"), ("weights", "b"), ("adapters", "a")]):
        state.set("stage", capability, {"value": value}, key)
    state.keep_only("stage", "weights", "b")
    assert values(state) == [1, 2]
    assert [state.get("stage", "weights", key) for key in "ab"] == [None, {"value": 1}]


def test_the_newest_value_comes_back_that_was_not_taken_back() -> None:
    state = DesiredState()
    parts = [state.set("stage", "weights", {"value": value}) for value in range(MAX_CALLS + 4)]
    state.take_back(parts[-2])
    state.take_back(parts[-1])
    assert values(state) == [MAX_CALLS + 1]
    for part in reversed(parts[:-2]):
        state.take_back(part)
    assert values(state) == [], "the earliest ones are forgotten"
    assert len(list(_values(parts[-1]))) == MAX_CALLS + 1


def test_a_value_that_a_worker_has_carried_out_is_not_forgotten_for_later_ones() -> None:
    state = DesiredState()
    first, second = (state.set("stage", "weights", {"value": value}) for value in (1, 2))
    third = state.set("stage", "weights", {"value": 3})
    first.established = second.established = third.established = True
    state.take_back(third)
    later = [state.set("stage", "weights", {"value": value}) for value in range(3, 2 * MAX_CALLS)]
    for part in later:
        state.take_back(part)
    assert values(state) == [2]
    assert len(list(_values(later[-1]))) == MAX_CALLS + 2


def test_a_part_is_to_blame_when_each_that_loaded_beside_it_has_had_its_try() -> None:
    part = DesiredState().set("stage", "adapters", {"value": 1})
    raised, slow, again, third, added = (Incarnation() for _ in range(5))
    assert not part.is_to_blame(raised, {raised, slow})
    assert not part.is_to_blame(again, {again, slow}), "the slow one still loads"
    assert part.is_to_blame(third, {third, added}), "the slow one has ended; nothing is known of one that began later"


def test_a_part_is_to_blame_when_the_last_that_loads_raises_at_it() -> None:
    part = DesiredState().set("stage", "adapters", {"value": 1})
    raised, slow = Incarnation(), Incarnation()
    assert not part.is_to_blame(raised, {raised, slow})
    part.unanswered.add(Address("stage", 0))
    assert not part.is_to_blame(slow, {slow, Incarnation()}), "a worker that runs may yet carry it out"
    part.unanswered.clear()
    assert part.is_to_blame(slow, {slow, Incarnation()})


@pytest.mark.parametrize(
    ("reply", "left", "is_carried_out"),
    [
        pytest.param(Reply(value=1), [1, 2], True, id="done"),
        pytest.param(Reply(error=InvalidRequest("no such file")), [1], False, id="refused"),
        pytest.param(Reply(error=WorkerLost("stage", 0, "weights", None)), [1, 2], False, id="lost"),
    ],
)
async def test_the_answer_of_a_worker_decides_what_becomes_of_a_part(
    reply: Reply, left: list[int], is_carried_out: bool
) -> None:
    state = DesiredState()
    state.set("stage", "weights", {"value": 1}, "a")
    part = state.set("stage", "weights", {"value": 2}, "b")
    calls = [PendingCall(Address("stage", replica), 1, "weights", 5.0) for replica in range(2)]
    for call in calls:
        state.follow(part, call)
    calls[0].end(reply)
    assert (values(state), part.carried_out, part.unanswered) == (left, is_carried_out, {calls[1].address})


def test_a_part_that_is_set_to_the_same_value_stays_when_that_is_taken_back() -> None:
    state = DesiredState()
    state.set("stage", "weights", {"value": 1})
    state.take_back(state.set("stage", "weights", {"value": 1}))
    assert values(state) == [1]


def test_a_state_that_is_too_large_to_send_is_refused_and_changes_nothing() -> None:
    state = DesiredState()
    state.set("stage", "weights", {"value": 1})
    with pytest.raises(InvalidRequest, match="exceeds"):
        state.set("stage", "weights", {"value": 2, "much": "x" * LARGEST_DESIRED}, "b")
    assert values(state) == [1]


def test_there_is_room_for_the_earlier_value_of_each_part() -> None:
    state = DesiredState()
    large = "x" * (LARGEST_DESIRED // 2)
    state.set("stage", "weights", {"value": 1, "much": large}, "a")
    state.set("stage", "weights", {"value": 2}, "a")
    with pytest.raises(InvalidRequest, match="exceeds"):
        state.set("stage", "weights", {"value": 3, "much": large}, "b")
    assert values(state) == [2]
