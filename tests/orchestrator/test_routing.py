"""The choice among free replicas, as tables."""

from __future__ import annotations

import numpy as np
import pytest

from omni_actors.orchestrator import routing
from omni_actors.orchestrator.pieces import Input
from omni_actors.orchestrator.request_input import RequestInput
from omni_actors.orchestrator.routing import SLACK, Affinity, Candidate, Holder, StageRouting
from omni_actors.protocol.messages import Address

TEXT = "".join(f"{n:08}" for n in range(200))
"""1600 characters: six blocks."""


def replica(number: int, load: int = 0, *, generation: int = 1, congested: bool = False) -> Candidate:
    return Candidate(Address("s", number), generation, load, congested)


def asks(text: str = "", session: str | None = None) -> Affinity:
    return Affinity(session, RequestInput({"messages": [Input({"prompt": text})]}, {}))


@pytest.mark.parametrize(
    ("candidates", "chosen"),
    [
        ([replica(0)], 0),
        ([replica(0, 2), replica(1, 1)], 1),
        ([replica(0, 1), replica(1, 1)], 0),
        ([replica(0, 0, congested=True), replica(1, 9)], 1),
        ([replica(0, 5, congested=True), replica(1, 3, congested=True)], 1),
    ],
)
def test_least_outstanding(candidates: list[Candidate], chosen: int) -> None:
    assert routing.least_outstanding(candidates).address.replica == chosen


@pytest.mark.parametrize(
    ("numbers", "last", "chosen"), [((0, 1, 2), -1, 0), ((0, 1, 2), 0, 1), ((0, 1, 2), 2, 0), ((0, 3), 1, 3)]
)
def test_round_robin(numbers: tuple[int, ...], last: int, chosen: int) -> None:
    assert routing.round_robin([replica(n, 9 - n) for n in numbers], last).address.replica == chosen
    congested = [replica(n, congested=n == chosen) for n in numbers]
    assert routing.round_robin(congested, last).address.replica != chosen


@pytest.mark.parametrize(
    ("candidate", "same_life", "is_chosen"),
    [
        (replica(1, SLACK), True, True),
        (replica(1, SLACK + 1), True, False),
        (replica(1, congested=True), True, False),
        (replica(1, generation=2), True, False),
        (replica(1, generation=2), False, True),
        (replica(2), False, False),
    ],
)
def test_a_preferred_replica(candidate: Candidate, same_life: bool, is_chosen: bool) -> None:
    found = routing.preferred([replica(0), candidate], Holder(Address("s", 1), 1), same_life=same_life)
    assert (found == candidate) is is_chosen


def test_a_prefix_goes_where_the_longest_part_of_it_was() -> None:
    stage = StageRouting("prefix")
    assert stage.choose([replica(0), replica(1, 1)], asks(TEXT[:600])).replica == 0
    assert stage.choose([replica(0, 1), replica(1)], asks(TEXT[:600] + "?" * 600)).replica == 0
    assert stage.choose([replica(0, 5), replica(1)], asks(TEXT)).replica == 1, "the other one is too busy"
    assert stage.choose([replica(0), replica(1, 1)], asks(TEXT + "more")).replica == 1
    assert stage.choose([replica(0), replica(1, 1, generation=2)], asks(TEXT + "more")).replica == 0, "it has died"
    assert stage.choose([replica(0, 1), replica(1)], asks("short")).replica == 1


def test_the_longest_of_several_known_prefixes_decides() -> None:
    stage, prompts = StageRouting("prefix"), [TEXT[:300] + end * 600 for end in "xy"]
    for number, prompt in enumerate(prompts):
        stage.choose([replica(number)], asks(prompt))
    for number in (0, 1, 0):
        assert stage.choose([replica(0), replica(1)], asks(prompts[number] + "?" * 600)).replica == number


def test_a_session_keeps_its_replica_with_any_policy() -> None:
    for policy in ("least_outstanding", "round_robin", "prefix"):
        stage = StageRouting(policy)
        first = stage.choose([replica(0), replica(1)], asks(session="a")).replica
        both = [replica(first, 3, generation=2), replica(1 - first)]
        assert stage.choose(both, asks(session="a")).replica == first
        assert stage.choose([replica(1 - first)], asks(session="a")).replica == 1 - first, "the first one is not free"
        assert stage.choose([replica(0), replica(1)], asks(session="a")).replica == 1 - first, "it has moved"


def test_round_robin_goes_on_where_it_was_after_the_request_of_a_session() -> None:
    stage, all_of_them = StageRouting("round_robin"), [replica(n) for n in range(3)]
    assert stage.choose(all_of_them, asks(session="a")).replica == 0
    chosen = []
    for _ in range(6):
        chosen.append(stage.choose(all_of_them, asks()).replica)
        assert stage.choose(all_of_them, asks(session="a")).replica == 0
    assert chosen == [1, 2, 0, 1, 2, 0]


def test_a_choice_among_one_replica_is_remembered_where_a_later_one_depends_on_it() -> None:
    assert not StageRouting("least_outstanding").remembers(asks(TEXT))
    assert StageRouting("least_outstanding").remembers(asks(session="a"))
    assert StageRouting("round_robin").remembers(asks(TEXT))
    assert StageRouting("prefix").remembers(asks(TEXT))


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routing, "SESSIONS", 3)
    monkeypatch.setattr(routing, "PREFIXES", 4)
    stage = StageRouting("prefix")
    for number in range(9):
        stage.choose([replica(0)], asks(f"{number}" * 600, f"{number}"))
    for number in (7, 9):
        stage.choose([replica(0)], asks(f"{number}" * 600, f"{number}"))
    assert list(stage._sessions) == ["8", "7", "9"], "the latest ones"
    assert len(stage._prefixes) == 4


def hashes(messages: list[dict[str, object]]) -> list[bytes]:
    return list(routing.prefix_hashes({"messages": [Input({"messages": messages})]}))


def test_a_conversation_that_goes_on_has_the_hashes_of_its_beginning() -> None:
    begun: list[dict[str, object]] = [{"role": "system", "content": TEXT}, {"role": "user", "content": "hello " * 99}]
    longer = [*begun, {"role": "assistant", "content": "yes"}, {"role": "user", "content": "x" * 999}]
    assert len(hashes(begun)) == 8
    assert hashes(longer)[:8] == hashes(begun)
    assert hashes([{"role": "system", "content": "!" + TEXT}])[0] != hashes(begun)[0]


def test_a_block_is_hashed_when_it_is_whole() -> None:
    assert len(hashes([{"": "x" * (routing.BLOCK_BYTES - 9)}])) == 0
    assert len(hashes([{"": "x" * (routing.BLOCK_BYTES - 8)}])) == 1, "with the 8 bytes of the name 'messages'"


@pytest.mark.parametrize(
    ("value", "other"),
    [("x", "y"), (1, 2), (True, False), ([1, 2], [1, 3]), (b"x", b"y"), (1.5, 2.5), ({"a": 1}, {"b": 1})],
)
def test_prompts_that_begin_differently_have_other_hashes(value: object, other: object) -> None:
    rest = {"content": TEXT}
    assert hashes([{"a": value}, rest])[0] != hashes([{"a": other}, rest])[0]


def test_hashes_of_any_input() -> None:
    ids = np.arange(10_000)
    pieces = [Input({"a": None, "b": b"x", "c": object()}, {"token_ids": ids, "odd": np.array(["text"]), "no": 3})]
    assert len(list(routing.prefix_hashes({"messages": pieces}))) == routing.BLOCKS
    assert list(routing.prefix_hashes({})) == []
