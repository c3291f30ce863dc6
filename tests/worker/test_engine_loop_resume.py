"""An engine loop's part when a resumable stage starts again: what it answers, drops, leaves out and passes on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from omni_actors.protocol.messages import (
    CLIENT_ADDRESS,
    Abort,
    Address,
    ControlMessage,
    Decided,
    Finished,
    JournalPart,
    Resend,
    Started,
    Switch,
    Switched,
    Unreplayable,
)
from ringbuf import Consumer, Producer
from tests.support.deciding_engine import DecidingEngine
from tests.support.engine_loop_harness import LoopHarness, open_harness, receive, send
from tests.support.stage_context import stage_context

ABOVE, ABOVE_1, BELOW, BELOW_1 = (Address(stage, number) for stage in ("above", "below") for number in (0, 1))
PLENTY = 1 << 20


@pytest.fixture
def harness() -> Iterator[LoopHarness]:
    with open_harness(resumable=True) as harness:
        harness.run(DecidingEngine(stage_context()))
        yield harness


def send_decided(into: Producer, seq: int, *, last: bool = False) -> None:
    send(into, 1, seq, last=last, source="above", decisions=(seq * 10,), trail=[[seq, seq * 10]])


def answers(harness: LoopHarness, question: int, **known: int) -> list[ControlMessage]:
    harness.post(Switch(1, question, {"above": ABOVE_1}, known))
    found = [harness.next_message()]
    while not isinstance(found[-1], Switched):
        found.append(harness.next_message())
    return found


def test_the_answer_has_the_entries_that_the_parent_lacks(harness: LoopHarness) -> None:
    into, out = harness.input(source="above"), harness.output()
    harness.start(1, sources=("above",))
    for seq in range(3):
        send_decided(into, seq)
        receive(out)
    part = JournalPart(1, Decided("above", 1, ((10,), (20,))))
    assert answers(harness, 1, above=1) == [part, Switched(1, 1, {"above": 3})]
    assert answers(harness, 2, above=9) == [Switched(1, 2, {"above": 3})]


def test_a_stage_that_has_finished_answers_until_the_request_ends(harness: LoopHarness) -> None:
    """Its last chunks may still be in a ring to the client, and the parent knows nothing of them."""
    into, _ = harness.input(source="above"), harness.output()
    harness.start(1, sources=("above",))
    send_decided(into, 0, last=True)
    assert isinstance(harness.next_message(), Finished)
    assert answers(harness, 1) == [JournalPart(1, Decided("above", 0, ((0,),))), Switched(1, 1, {"above": 1})]
    assert harness.loop.requests == {1}
    harness.post(Abort(1))
    assert answers(harness, 2) == [Switched(1, 2, {})]
    assert not harness.loop.requests


def test_chunks_are_taken_from_the_replica_that_the_parent_named(harness: LoopHarness) -> None:
    old, new = harness.input(source="above"), harness.input(source="above", replica=1)
    out = harness.output()
    harness.start(1, sources=("above",))
    send_decided(old, 0)
    receive(out)
    assert answers(harness, 1, above=1) == [Switched(1, 1, {"above": 1})]
    send_decided(old, 1)
    harness.wait_asleep()
    send(new, 1, 1, last=True, source="above", decisions=(77,), trail=[[1, 77]])
    assert receive(out).data["trail"][0] == [1, 77]


def test_while_no_replica_holds_the_request_no_chunk_is_taken(harness: LoopHarness) -> None:
    into, out = harness.input(source="above"), harness.output()
    harness.start(1, sources=("above",))
    harness.post(Switch(1, 1, {"above": None}, {}))
    assert harness.next_message() == Switched(1, 1, {"above": 0})
    send_decided(into, 0)
    harness.wait_asleep()
    assert out.try_recv() is None


def start_again(harness: LoopHarness, *needed_from: int) -> None:
    harness.post(JournalPart(1, Decided("here", 0, ((1,), (2,)))), JournalPart(1, Decided("here", 2, ((3,),))))
    harness.start(
        1,
        sources=("above",),
        targets=(CLIENT_ADDRESS, BELOW)[: len(needed_from)],
        retained=True,
        replayed=True,
        needed_from=needed_from,
    )
    assert harness.next_message() == Started(1)


def decided_here(out: Consumer, count: int) -> list[tuple[int, tuple[int, ...] | None]]:
    chunks = [receive(out) for _ in range(count)]
    return [(chunk.seq, chunk.decisions) for chunk in chunks]


def test_each_target_gets_what_it_lacks(harness: LoopHarness) -> None:
    into, client, below = harness.input(source="above"), harness.output(), harness.output(target=BELOW)
    start_again(harness, 2, 1)
    for seq in range(4):
        send_decided(into, seq)
    assert decided_here(client, 1) == [(2, (3,))]
    assert decided_here(below, 2) == [(1, (2,)), (2, (3,))]
    fresh = receive(client)
    assert fresh == receive(below)
    assert fresh.seq == 3
    assert fresh.decisions not in [(1,), (2,), (3,)]


def test_a_consumer_that_starts_again_gets_what_another_one_had(harness: LoopHarness) -> None:
    into, _ = harness.input(source="above"), harness.output()
    start_again(harness, 3)
    for seq in range(3):
        send_decided(into, seq)
    harness.wait_asleep()
    below = harness.output(target=BELOW)
    harness.post(Resend(1, BELOW))
    assert decided_here(below, 3) == [(0, (1,)), (1, (2,)), (2, (3,))]


def test_the_first_chunk_for_a_target_passes_on_all_that_is_known(harness: LoopHarness) -> None:
    """The chunks before it, which the target had from an earlier incarnation, may have carried less."""
    into, client, below = harness.input(source="above"), harness.output(), harness.output(target=BELOW)
    start_again(harness, 2, 0)
    received = []
    for seq in range(4):
        send_decided(into, seq)
        received.append(receive(below).upstream)
    assert received == [(Decided("above", seq, ((seq * 10,),)),) for seq in range(4)]
    assert receive(client).upstream == (Decided("above", 0, ((0,), (10,), (20,))),)
    assert receive(client).upstream == (Decided("above", 3, ((30,),)),)


def test_outputs_that_no_consumer_needs_are_neither_computed_nor_retained(harness: LoopHarness) -> None:
    into, out = harness.input(source="above"), harness.output(target=BELOW)
    harness.post(JournalPart(1, Decided("stage", 0, ((70,), (71,), (72,)))))
    harness.start(
        1, sources=("above",), targets=(BELOW,), replayed=True, retained=True, needed_from=(2,), computed_from=2
    )
    assert harness.next_message() == Started(1)
    for seq in range(3):
        send_decided(into, seq)
    why = "its first outputs were not computed again after a death"
    assert harness.next_message() == Unreplayable(1, why, needed=False)
    found = receive(out)
    assert (found.seq, found.data["trail"]) == (2, [[2, 20], [2, 72]])
    harness.post(Resend(1, BELOW))
    assert harness.next_message() == Unreplayable(1, why, needed=True)


def test_a_consumer_that_starts_again_before_them_is_sent_no_outputs_that_are_left_out(harness: LoopHarness) -> None:
    into, out, other = harness.input(source="above"), harness.output(target=BELOW), harness.output(target=BELOW_1)
    harness.post(JournalPart(1, Decided("stage", 0, ((70,), (71,), (72,)))))
    harness.start(
        1, sources=("above",), targets=(BELOW,), replayed=True, retained=True, needed_from=(2,), computed_from=2
    )
    assert harness.next_message() == Started(1)
    harness.post(Resend(1, BELOW_1))
    why = "its first outputs were not computed again after a death"
    assert harness.next_message() == Unreplayable(1, why, needed=True)
    for seq in range(3):
        send_decided(into, seq)
    assert receive(out).seq == 2
    assert other.try_recv() is None


def test_outputs_that_are_computed_though_no_consumer_needs_them_are_retained(harness: LoopHarness) -> None:
    """So a later death of the consumer has them sent again, and not computed again."""
    into, out = harness.input(source="above"), harness.output(target=BELOW)
    harness.post(JournalPart(1, Decided("stage", 0, ((70,), (71,)))))
    harness.start(1, sources=("above",), targets=(BELOW,), replayed=True, retained=True, needed_from=(2,))
    assert harness.next_message() == Started(1)
    for seq in range(3):
        send_decided(into, seq)
    assert receive(out).seq == 2
    harness.post(Resend(1, BELOW))
    assert [receive(out).seq for _ in range(3)] == [0, 1, 2]
