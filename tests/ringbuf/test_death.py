"""Death at every step of sending and receiving: what the survivor observes, and where a successor continues.

Each test runs a script in a child again and again. It is killed just before its n-th access of each kind to what both
sides share (see death_scripts.py), for each n until one comes to its end.
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any, TypeAlias

import pytest

from ringbuf import Consumer, PeerDied, Producer, Ring, RingClosed, WrongGeneration
from ringbuf._words import CONSUMER, PRODUCER, Column
from tests.ringbuf.child_processes import WATCHDOG_S, Child, ChildHost
from tests.ringbuf.death_scripts import CAPACITY, FILLING, MESSAGES, SLEEPING, START, STREAM
from tests.ringbuf.descriptors import descriptors, duplicates

Bear: TypeAlias = Callable[[], Child]

SENDING = {
    "ring",
    "store producer.claim",
    "store producer.position",
    "store producer.closed",
    "load consumer.waits",
    "store record word 0",
    "copy a payload",
    "copy a payload's second half",
}
RECEIVING = {
    "store consumer.claim",
    "load record word 0",
    "look at a payload",
    "store consumer.position",
    "store consumer.closed",
}
ASLEEP = {"sleep", "clear"}


@pytest.fixture(scope="module")
def host() -> Iterator[ChildHost]:
    with ChildHost("tests.ringbuf.death_scripts") as host:
        yield host


def at_every_step(host: ChildHost, script: str, checksums: bool, outlive: Callable[[Ring, Bear], Child]) -> set[str]:
    """The kinds of steps at which a child died. ``outlive`` has it born, and looks at what it leaves."""

    def at(step: str, occurrence: int) -> Child:
        before = descriptors()
        with Ring.create(CAPACITY, generation=1, checksums=checksums) as ring:
            ring._segment.words[PRODUCER.position] = ring._segment.words[CONSUMER.position] = START
            try:
                child = outlive(ring, lambda: host.start(ring, script, step, occurrence))
                a_new_generation_attaches(ring)
            except BaseException as error:
                if (dead := host.child) is not None:
                    dead.kill()
                    error.add_note(f"death before {step!r}, number {occurrence}; the child reported {dead.reports}")
                raise
            assert child.status == (signal.SIGKILL if step and not has_finished(child) else 0), child.reports
        assert descriptors() == before
        return child

    died: set[str] = set()
    for step in at("", 0).reports[-1].removeprefix("took ").split("; "):
        for occurrence in itertools.count():
            if has_finished(at(step, occurrence)):
                break
            died.add(step)
    return died


def has_finished(child: Child) -> bool:
    return child.reports[-1:] != [] and child.reports[-1].startswith("took ")


def numbers(child: Child, verb: str) -> set[int]:
    """Return the numbers of the messages that the child reported with this verb."""
    return {int(line.split()[1]) for line in child.reports if line.split()[0] == verb}


def a_new_generation_attaches(old: Ring) -> None:
    with pytest.raises(WrongGeneration):
        Ring.attach(duplicates(old), generation=2)
    with (
        Ring.create(CAPACITY, generation=2) as new,
        Ring.attach(duplicates(new), generation=2) as twin,
    ):
        assert passed_through(new.claim_producer(), twin.claim_consumer(), [b"new"]) == [b"new"]


def passed_through(producer: Producer, consumer: Consumer, messages: Sequence[bytes]) -> list[bytes]:
    """What comes out when these go in, and what was there before them."""
    received: list[bytes] = []

    def take() -> None:
        while (frame := consumer.try_recv()) is not None:
            received.append(bytes(frame.data))
            frame.release()

    for message in messages:
        for _ in producer.sending(message):
            take()
    take()
    return received


def drained(consumer: Consumer) -> tuple[list[bytes], RingClosed | PeerDied]:
    """Blocking: what came, and what ended it."""
    received: list[bytes] = []
    try:
        while True:
            with consumer.recv(WATCHDOG_S) as frame:
                received.append(bytes(frame.data))
    except (RingClosed, PeerDied) as error:
        return received, error


def wait_until(happened: Callable[[], bool]) -> None:
    give_up = time.monotonic() + WATCHDOG_S
    while not happened():
        assert time.monotonic() < give_up
        time.sleep(0.0002)


def asleep(ring: Ring, column: Column, peer: Column) -> bool:
    """For good, as long as the peer does nothing."""
    return ring._segment.words[column.waits] > ring._segment.words[peer.position]


def outlive_producer(messages: Sequence[bytes], wait_for: Callable[[Ring, Child], object]) -> Callable[..., Child]:
    def outlive(ring: Ring, bear: Bear) -> Child:
        consumer = ring.claim_consumer()
        assert consumer.park()  # the child has a consumer to wake
        child = bear()
        wait_for(ring, child)
        if ring.peer_pids[0] is None:
            child.wait()
            assert consumer.try_recv() is None
            received: list[bytes] = []
        else:
            received, end = drained(consumer)
            child.wait()
            if ring._segment.is_closed(PRODUCER):
                assert isinstance(end, RingClosed)
                assert len(received) == len(messages)
            else:
                assert isinstance(end, PeerDied)
                assert (end.end, end.pid) == ("producer", child.pid)
        count, committed = len(received), len(numbers(child, "sent"))
        assert received == list(messages[:count])
        assert committed <= count <= committed + 1
        assert ring.statistics().used == 0
        assert count <= ring.statistics().messages <= count + 1
        if ring._segment.is_closed(PRODUCER):
            with pytest.raises(RingClosed):
                ring.claim_producer()
        else:
            successor = ring.claim_producer()
            assert passed_through(successor, consumer, messages[count:]) == list(messages[count:])
            assert len(messages) <= ring.statistics().messages <= len(messages) + 1
            successor.close()
            assert isinstance(drained(consumer)[1], RingClosed)
        return child

    return outlive


def outlive_consumer(
    messages: tuple[bytes, ...], sent_before: int, wait_for: Callable[[Ring, Child], object]
) -> Callable[..., Child]:
    def outlive(ring: Ring, bear: Bear) -> Child:
        producer = ring.claim_producer()
        assert all(producer.try_send(message) for message in messages[:sent_before])
        child = bear()
        wait_for(ring, child)
        rest = list(messages[sent_before:])
        end: RingClosed | PeerDied | None = None
        claimed = ring.peer_pids[1] is not None
        if claimed:
            try:
                while rest:
                    producer.send(rest[0], timeout=WATCHDOG_S)
                    rest.pop(0)
                wait_until(lambda: child.is_dead() or asleep(ring, CONSUMER, PRODUCER))
                if child.is_dead():
                    producer.send(bytes(3 * CAPACITY), timeout=WATCHDOG_S)
                else:
                    producer.close()
            except (RingClosed, PeerDied) as error:
                end = error
        child.wait()
        if isinstance(end, PeerDied):
            assert (end.end, end.pid) == ("consumer", child.pid)
        if ring._segment.is_closed(CONSUMER):
            with pytest.raises(RingClosed):
                ring.claim_consumer()
            return child
        successor = ring.claim_consumer()
        if ring._segment.is_closed(PRODUCER):
            received, closed = drained(successor)
            assert isinstance(closed, RingClosed)
        else:
            assert not claimed or isinstance(end, PeerDied)
            received = passed_through(producer, successor, rest)
        first, last = unbroken(numbers(child, "released")), unbroken(numbers(child, "releasing"))
        # Fragments are given back as they are taken, so their message may be lost with the consumer of the last one.
        last += messages[last : last + 1] == (STREAM[1],)
        assert received in [list(messages[n:]) for n in range(first, last + 1)]
        assert ring.statistics()[1:3] == (0, len(messages))
        return child

    return outlive


def unbroken(numbers: set[int]) -> int:
    """How many from 0 on, without a gap."""
    return next(n for n in range(len(numbers) + 1) if n not in numbers)


def until_dead(ring: Ring, child: Child) -> None:
    wait_until(child.is_dead)


def until_asleep(ring: Ring, child: Child) -> None:
    """Not only until it announces sleep: it looks again then, and stays awake if something has come meanwhile."""
    wait_until(lambda: child.is_dead() or child.has_reported(SLEEPING))


@pytest.mark.slow
def test_a_producer_that_dies_at_any_step_of_whole_messages(host: ChildHost) -> None:
    steps = at_every_step(host, "send whole", True, outlive_producer(MESSAGES, until_dead))
    assert steps >= SENDING | {"end", "store record word 3", "fill a reservation's second half"}


@pytest.mark.slow
def test_a_producer_that_dies_at_any_step_of_fragments(host: ChildHost) -> None:
    steps = at_every_step(host, "send fragments", False, outlive_producer(STREAM, until_asleep))
    assert steps >= SENDING | ASLEEP


def test_a_producer_that_dies_at_any_step_of_waiting_for_space(host: ChildHost) -> None:
    steps = at_every_step(
        host,
        "send into a full ring",
        False,
        outlive_producer(FILLING, until_asleep),
    )
    assert steps >= SENDING | ASLEEP | {"store producer.waits"}


def test_a_consumer_that_dies_at_any_step_of_whole_messages(host: ChildHost) -> None:
    steps = at_every_step(host, "receive whole", True, outlive_consumer(MESSAGES, len(MESSAGES), until_dead))
    assert steps >= RECEIVING | {"end", "read a payload"}


@pytest.mark.slow
def test_a_consumer_that_dies_at_any_step_of_fragments(host: ChildHost) -> None:
    steps = at_every_step(host, "receive fragments", False, outlive_consumer(STREAM, 0, until_asleep))
    assert steps >= RECEIVING | ASLEEP


def test_a_consumer_that_dies_at_any_step_of_waiting_for_messages(host: ChildHost) -> None:
    steps = at_every_step(
        host,
        "receive from an empty ring",
        False,
        outlive_consumer(MESSAGES[:2], 0, until_asleep),
    )
    assert steps >= RECEIVING | ASLEEP | {"store consumer.waits"}


def test_at_no_instant_does_a_ring_have_a_name() -> None:
    """So there is none at which a death could leave it behind: looked at before each line of ours that runs."""
    lines: set[tuple[str, int]] = set()
    named: set[str] = set()

    def look(frame: FrameType, event: str, argument: Any) -> Any:
        if "ringbuf" not in frame.f_code.co_filename:
            return None
        lines.add((frame.f_code.co_name, frame.f_lineno))
        for fd in descriptors():
            try:
                target = os.readlink(f"/proc/self/fd/{fd}")
            except FileNotFoundError:
                continue  # the one that listed them
            if target.startswith("/dev/shm") and not target.endswith("(deleted)"):
                named.add(f"{target} before {frame.f_code.co_name}:{frame.f_lineno}")
        return look

    tracing = sys.gettrace()
    sys.settrace(look)
    try:
        with Ring.create() as ring:
            ring.claim_producer().send(b"x")
            ring.claim_consumer().recv().release()
    finally:
        sys.settrace(tracing)
    assert not named
    assert {"create_memory", "claim", "publish_record", "close"} <= {name for name, _ in lines}
