"""Records pass from ring to ring as they lie there, and messages arrive as if they had been sent to the last ring."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import ringbuf._words
from ringbuf import Consumer, Producer, Record, Ring, RingClosed, RingMisuse

CAPACITY = 4096
sizes = st.integers(0, 300) | st.integers(0, 3 * CAPACITY)


class Passage:
    """Passes records on from one ring to another. A record waits until the other ring has room for it."""

    def __init__(self, source: Consumer, target: Producer) -> None:
        self._source, self._target = source, target
        self._waiting: Record | None = None

    def pass_on(self, limit: int) -> None:
        """Pass up to ``limit`` records on, as far as there is room."""
        for _ in range(limit):
            record = self._waiting or self._source.try_record()
            if record is None:
                return
            room = self._target.try_reserve(len(record.frame.data))
            self._waiting = record if room is None else None
            if room is None:
                return
            room[:] = record.frame.data
            self._target.commit_record(record.kind, record.place)
            record.frame.release()


@given(st.lists(sizes, max_size=12), st.integers(1, 4))
@example([2817, 1985], 2)
@settings(max_examples=100)
def test_messages_that_pass_two_rings_arrive_whole(messages: list[int], limit: int) -> None:
    with pytest.MonkeyPatch.context() as patch, Ring.create(CAPACITY) as first, Ring.create(CAPACITY) as second:
        patch.setattr(ringbuf._words, "WARM", 1024)
        producer, source = first.claim_producer(), first.claim_consumer()
        target, consumer = second.claim_producer(), second.claim_consumer()
        passage = Passage(source, target)
        for number, size in enumerate(messages):
            message = bytes([number + 1]) * size
            sending = producer.sending(message)
            received = None
            finished = False
            while received is None:
                finished = finished or next(sending, "finished") == "finished"
                passage.pass_on(limit)
                received = consumer.try_recv()
            assert received.data == message
            received.release()
            assert finished or next(sending, "finished") == "finished"
        assert first.statistics()[1:] == second.statistics()[1:] == (0, len(messages), sum(messages))


def test_a_message_that_was_given_up_is_dropped_at_the_second_ring() -> None:
    with Ring.create(CAPACITY) as first, Ring.create(CAPACITY) as second:
        producer, source = first.claim_producer(), first.claim_consumer()
        target, consumer = second.claim_producer(), second.claim_consumer()
        passage = Passage(source, target)
        sending = producer.sending(bytes(3 * CAPACITY))
        next(sending)
        passage.pass_on(10)
        assert consumer.try_recv() is None
        sending.close()
        producer.send(b"next")
        passage.pass_on(10)
        with consumer.recv(0) as frame:
            assert frame.data == b"next"


@pytest.mark.parametrize(("kind", "place"), [(0, 0), (5, 0), (255, 0), (1, -1), (2, 1 << 33)])
def test_a_record_that_no_ring_has_is_refused(kind: int, place: int) -> None:
    with Ring.create(CAPACITY) as ring:
        producer, consumer = ring.claim_producer(), ring.claim_consumer()
        with pytest.raises(RingMisuse):
            producer.commit_record(1, 0)
        room = producer.try_reserve(3)
        assert room is not None
        room[:] = b"abc"
        with pytest.raises(ValueError, match="of kind"):
            producer.commit_record(kind, place)
        producer.commit()
        with consumer.recv(0) as frame:
            assert frame.data == b"abc"


def test_records_end_a_park_and_the_ring() -> None:
    with Ring.create(CAPACITY) as ring:
        producer, consumer = ring.claim_producer(), ring.claim_consumer()
        assert consumer.try_record() is None
        assert consumer.park()
        producer.send(b"x")
        producer.close()
        record = consumer.try_record()
        assert record is not None
        assert (record.kind, record.place, bytes(record.frame.data)) == (1, 0, b"x")
        record.frame.release()
        with pytest.raises(RingClosed, match="producer"):
            consumer.try_record()
        consumer.close()
        with pytest.raises(RingClosed, match="consumer"):
            consumer.try_record()
