"""The ring against a deque: any order of calls, and of deaths, gives what the deque gives, and the space adds up."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator
from typing import NamedTuple

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import ringbuf._words
from ringbuf import Frame, Ring, RingClosed
from ringbuf._words import CONSUMER, HEADER, PAD, PRODUCER

CAPACITY = 4096
MAX_RESERVE = CAPACITY // 2 - 64
WARM = 1024
"""An empty ring begins again at its start beyond this, as large ones do beyond 4 MiB."""
DEAD = 1 << 22 | (1 << 22) - 1
"""The claim of a process that is no more."""
sizes = st.integers(0, 200) | st.integers(0, MAX_RESERVE)


class Sent(NamedTuple):
    """start: position of the message's first record."""

    start: int
    message: bytes


class RingAgainstDeque(RuleBasedStateMachine):
    @initialize(checksums=st.booleans())
    def begin(self, checksums: bool) -> None:
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(ringbuf._words, "WARM", WARM)
        self.ring = Ring.create(CAPACITY, checksums=checksums)
        self.words = self.ring._segment.words
        self.producer, self.consumer = self.ring.claim_producer(), self.ring.claim_consumer()
        self.log: list[Sent] = []
        self.expected: deque[bytes] = deque()
        self.held: list[tuple[Frame, bytes]] = []
        self.sending: Generator[None, None, None] | None = None
        self.being_sent = b""
        self.start: int | None = None
        self.lost = False
        self.written = 0

    def message(self, size: int) -> bytes:
        self.written += 1
        return (self.written.to_bytes(2, "little") * (size // 2 + 1))[:size]

    def first_record(self, tail: int) -> int | None:
        """Position of the first record, padding apart, since the tail was this; None: there is none."""
        if self.words[PRODUCER.position] == tail:
            return None
        if self.words[(HEADER + tail % CAPACITY) // 8] & 0xFF == PAD:
            return tail + CAPACITY - tail % CAPACITY
        return tail

    def was_sent(self, tail: int, message: bytes) -> None:
        start = self.first_record(tail)
        assert start is not None
        self.log.append(Sent(start, message))
        self.expected.append(message)

    @precondition(lambda self: self.sending is None)
    @rule(size=sizes)
    def try_send(self, size: int) -> None:
        message = self.message(size)
        tail = self.words[PRODUCER.position]
        if self.producer.try_send(message[: size // 3], message[size // 3 :]):
            self.was_sent(tail, message)
        else:
            assert self.ring.statistics().used, "an empty ring takes any message up to max_reserve"
            assert self.words[PRODUCER.position] == tail

    @precondition(lambda self: self.sending is None)
    @rule(size=sizes, commit=st.booleans())
    def reserve(self, size: int, commit: bool) -> None:
        tail = self.words[PRODUCER.position]
        view = self.producer.try_reserve(size)
        if view is None:
            return
        message = self.message(size)
        view[:] = message
        if commit:
            self.producer.commit()
            self.was_sent(tail, message)
        else:
            self.producer.abandon()

    @precondition(lambda self: self.sending is None)
    @rule(size=st.integers(0, 5 * CAPACITY))
    def start_sending(self, size: int) -> None:
        self.being_sent = self.message(size)
        self.tail, self.start, self.lost = self.words[PRODUCER.position], None, False
        self.sending = self.producer.sending(self.being_sent)
        self.go_on_sending()

    @precondition(lambda self: self.sending is not None)
    @rule()
    def go_on_sending(self) -> None:
        assert self.sending is not None
        finished = next(self.sending, "finished") == "finished"
        if self.start is None:
            self.start = self.first_record(self.tail)
        if finished:
            assert self.start is not None
            self.sending = None
            self.log.append(Sent(self.start, self.being_sent))
            if not self.lost:
                self.expected.append(self.being_sent)

    @precondition(lambda self: self.sending is not None)
    @rule()
    def give_sending_up(self) -> None:
        assert self.sending is not None
        self.sending.close()
        self.sending = None

    @rule(size=sizes)
    def a_producer_dies_inside_a_reservation_or_a_message(self, size: int) -> None:
        asleep = self.words[PRODUCER.waits]
        if self.sending is not None:
            self.give_sending_up()
        elif (view := self.producer.try_reserve(size)) is not None:
            view[:] = self.message(size)
        self.words[PRODUCER.waits], self.words[PRODUCER.claim] = asleep, DEAD
        self.producer = self.ring.claim_producer()

    @rule(park=st.booleans())
    def receive(self, park: bool) -> None:
        if park and self.expected:
            assert not self.consumer.park()
        elif park:
            self.consumer.park()
        frame = self.consumer.try_recv()
        if self.expected:
            assert frame is not None
            self.held.append((frame, self.expected.popleft()))
        else:
            assert frame is None

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        frame, message = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        assert frame.data == message
        frame.release()

    @rule(park=st.booleans())
    def a_consumer_dies_holding_what_it_holds(self, park: bool) -> None:
        """What it had not given back comes again, also what it had released behind a frame that it held."""
        if park:
            self.consumer.park()
        self.consumer._unreleased.clear()  # and with them the views of a mapping that is to be closed here
        self.held.clear()
        self.words[CONSUMER.claim] = DEAD
        self.consumer = self.ring.claim_consumer()
        head = self.words[CONSUMER.position]
        self.expected = deque(sent.message for sent in self.log if sent.start >= head)
        if self.sending is not None and self.start is not None:
            self.lost = self.start < head

    @invariant()
    def held_frames_do_not_change(self) -> None:
        assert all(frame.data == message for frame, message in self.held)

    @invariant()
    def the_books_balance(self) -> None:
        statistics = self.ring.statistics()
        assert statistics.messages == len(self.log)
        assert 0 <= statistics.used <= CAPACITY
        assert self.words[PRODUCER.position] % 64 == self.words[CONSUMER.position] % 64 == 0

    def teardown(self) -> None:
        """The producer closes, if inside a message or not."""
        self.producer.close()
        for frame, message in self.held:
            assert frame.data == message
            frame.release()
        for message in self.expected:
            with self.consumer.recv(0) as frame:
                assert frame.data == message
        with pytest.raises(RingClosed):
            self.consumer.recv(0)
        if self.sending is not None:
            with pytest.raises(RingClosed):
                next(self.sending)
        assert self.ring.statistics().used == 0
        self.ring.close()
        self.patch.undo()


TestRingAgainstDeque = RingAgainstDeque.TestCase
TestRingAgainstDeque.settings = settings(max_examples=80, stateful_step_count=50)
