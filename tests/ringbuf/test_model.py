"""The ring against a deque: any order of calls gives what the deque gives, and the space adds up."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ringbuf import Frame, Ring

CAPACITY = 4096
MAX_RESERVE = CAPACITY // 2 - 64
sizes = st.integers(0, 200) | st.integers(0, MAX_RESERVE)


class RingAgainstDeque(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.ring = Ring.create(CAPACITY)
        self.producer, self.consumer = self.ring.claim_producer(), self.ring.claim_consumer()
        self.expected: deque[bytes] = deque()
        self.held: list[tuple[Frame, bytes]] = []
        self.sending: Generator[None, None, None] | None = None
        self.being_sent = b""
        self.sent = 0
        self.written = 0

    def message(self, size: int) -> bytes:
        self.written += 1
        return (self.written.to_bytes(2, "little") * (size // 2 + 1))[:size]

    @precondition(lambda self: self.sending is None)
    @rule(size=sizes)
    def try_send(self, size: int) -> None:
        message = self.message(size)
        empty = self.ring.statistics().used == 0
        if self.producer.try_send(message[: size // 3], message[size // 3 :]):
            self.expected.append(message)
            self.sent += 1
        else:
            assert not empty, "an empty ring takes any message up to max_reserve"

    @precondition(lambda self: self.sending is None)
    @rule(size=sizes, commit=st.booleans())
    def reserve(self, size: int, commit: bool) -> None:
        view = self.producer.try_reserve(size)
        if view is None:
            return
        message = self.message(size)
        view[:] = message
        if commit:
            self.producer.commit()
            self.expected.append(message)
            self.sent += 1
        else:
            self.producer.abandon()

    @precondition(lambda self: self.sending is None)
    @rule(size=st.integers(0, 5 * CAPACITY))
    def start_sending(self, size: int) -> None:
        self.being_sent = self.message(size)
        self.sending = self.producer.sending(self.being_sent)
        self.go_on_sending()

    @precondition(lambda self: self.sending is not None)
    @rule()
    def go_on_sending(self) -> None:
        assert self.sending is not None
        try:
            next(self.sending)
        except StopIteration:
            self.sending = None
            self.expected.append(self.being_sent)
            self.sent += 1

    @precondition(lambda self: self.sending is not None)
    @rule()
    def give_sending_up(self) -> None:
        assert self.sending is not None
        self.sending.close()
        self.sending = None

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

    @invariant()
    def held_frames_do_not_change(self) -> None:
        assert all(frame.data == message for frame, message in self.held)

    @invariant()
    def the_books_balance(self) -> None:
        statistics = self.ring.statistics()
        assert statistics.messages == self.sent
        assert 0 <= statistics.used <= CAPACITY

    def teardown(self) -> None:
        if self.sending is not None:
            self.sending.close()
        for frame, _ in self.held:
            frame.release()
        while self.expected:
            frame = self.consumer.recv(0)
            assert frame.data == self.expected.popleft()
            frame.release()
        assert self.consumer.try_recv() is None
        assert self.ring.statistics().used == 0
        self.ring.close()


TestRingAgainstDeque = RingAgainstDeque.TestCase
TestRingAgainstDeque.settings = settings(max_examples=150, stateful_step_count=60)
