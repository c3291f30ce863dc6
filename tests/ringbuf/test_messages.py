"""One process, both ends: what is sent is what is received, in order, however it lies in the ring."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from ringbuf import Consumer, MessageTooLarge, Ring, RingClosed, RingMisuse


def drain(consumer: Consumer) -> list[bytes]:
    received = []
    while (frame := consumer.try_recv()) is not None:
        received.append(bytes(frame.data))
        frame.release()
    return received


def test_an_empty_ring_gives_none(ring: Ring) -> None:
    ring.claim_producer()
    assert ring.claim_consumer().try_recv() is None


def test_messages_of_every_size_come_out_as_they_went_in_across_many_laps(ring: Ring) -> None:
    producer, consumer = ring.claim_producer(), ring.claim_consumer()
    for n in range(producer.max_reserve + 1):
        message = bytes([n % 251]) * n
        assert producer.try_send(message)
        assert drain(consumer) == [message]
    assert ring.statistics().used == 0
    assert ring.statistics().messages == producer.max_reserve + 1
    assert ring.statistics().payload_bytes == producer.max_reserve * (producer.max_reserve + 1) // 2


def test_a_full_ring_refuses_and_takes_again_after_a_release(ring: Ring) -> None:
    producer, consumer = ring.claim_producer(), ring.claim_consumer()
    sent = 0
    while producer.try_send(sent.to_bytes(64, "little")):
        sent += 1
    assert sent == ring.capacity // 128
    assert ring.statistics().used == ring.capacity
    frame = consumer.try_recv()
    assert frame is not None
    assert not producer.try_send(b"no room before the release")
    frame.release()
    assert producer.try_send(bytes(64))
    assert not producer.try_send(b"")
    assert [int.from_bytes(m, "little") for m in drain(consumer)] == [*range(1, sent), 0]


def test_try_send_gathers_buffers_of_every_kind(ring: Ring) -> None:
    producer, consumer = ring.claim_producer(), ring.claim_consumer()
    array = np.arange(6, dtype=np.complex64).reshape(2, 3)
    parts: list[Any] = [
        b"ab",
        bytearray(b"cd"),
        memoryview(b"efgh")[1:3],
        array,
        np.zeros((0, 4)),
        np.arange(3, dtype=np.int32),
        np.full((2, 2), 7, np.uint8),
        np.float64(2.5).reshape(()),
    ]
    assert producer.try_send(*parts)
    numbers = np.arange(3, dtype=np.int32).tobytes() + bytes([7] * 4)
    assert drain(consumer) == [b"abcdfg" + array.tobytes() + numbers + np.float64(2.5).tobytes()]
    assert producer.try_send()
    assert drain(consumer) == [b""]


def test_a_buffer_that_is_not_contiguous_is_refused_and_nothing_is_sent(ring: Ring) -> None:
    producer, consumer = ring.claim_producer(), ring.claim_consumer()
    with pytest.raises(TypeError, match="C-contiguous"):
        producer.try_send(b"first", np.zeros((4, 4))[:, 1])
    assert drain(consumer) == []
    assert producer.try_send(b"next")
    assert drain(consumer) == [b"next"]


def test_frames_and_reservations_are_aligned(ring: Ring) -> None:
    producer, consumer = ring.claim_producer(), ring.claim_consumer()
    for n in (1, 63, 64, 65, 1000, producer.max_reserve, 3 * ring.capacity):
        if n <= producer.max_reserve:
            view = producer.try_reserve(n)
            assert view is not None
            assert np.frombuffer(view, np.uint8).ctypes.data % 64 == 0
            producer.commit()
            frame = consumer.try_recv()
        else:
            for _ in producer.sending(bytes(n)):
                frame = consumer.try_recv()
            frame = consumer.try_recv()
        assert frame is not None
        assert np.frombuffer(frame.data, np.uint8).ctypes.data % 64 == 0
        frame.release()


def test_a_reservation_is_invisible_until_commit_and_gone_after_abandon(ring: Ring) -> None:
    producer, consumer = ring.claim_producer(), ring.claim_consumer()
    view = producer.try_reserve(5)
    assert view is not None
    view[:] = b"draft"
    assert consumer.try_recv() is None
    producer.abandon()
    producer.abandon()
    assert consumer.try_recv() is None
    assert ring.statistics().used == 0
    with pytest.raises(ValueError, match="released"):
        view[:] = b"later"
    view = producer.try_reserve(5)
    assert view is not None
    view[:] = b"final"
    producer.commit()
    assert drain(consumer) == [b"final"]


def test_a_reservation_waits_for_room(ring: Ring) -> None:
    producer, consumer = ring.claim_producer(), ring.claim_consumer()
    while producer.try_send(bytes(64)):
        pass
    with pytest.raises(TimeoutError):
        producer.reserve(64, timeout=0)
    consumer.recv().release()
    producer.reserve(5, timeout=0)[:] = b"fits!"
    producer.commit()
    assert drain(consumer)[-1] == b"fits!"


def test_a_position_has_passed_when_all_before_it_is_released_or_the_consumer_closed(ring: Ring) -> None:
    producer, consumer = ring.claim_producer(), ring.claim_consumer()
    positions = []
    for message in (b"one", b"two"):
        producer.send(message)
        positions.append(producer.position)
    first, second = consumer.recv(), consumer.recv()
    second.release()
    assert not producer.has_passed(positions[0])
    first.release()
    assert producer.has_passed(positions[0])
    assert producer.has_passed(positions[1])
    producer.send(b"three")
    assert not producer.has_passed(producer.position)
    assert not producer.consumer_closed
    consumer.close()
    assert producer.has_passed(producer.position)
    assert producer.consumer_closed


def test_misuse_is_refused_and_changes_nothing(ring: Ring) -> None:
    producer, consumer = ring.claim_producer(), ring.claim_consumer()
    with pytest.raises(RingMisuse, match="nothing is reserved"):
        producer.commit()
    producer.try_reserve(8)
    for call in (
        lambda: producer.try_reserve(1),
        lambda: producer.try_send(b"x"),
        lambda: producer.send(b"x"),
        lambda: next(producer.sending(b"x")),
    ):
        with pytest.raises(RingMisuse, match="reservation is open"):
            call()
    producer.abandon()
    under_way = producer.sending(bytes(2 * ring.capacity))
    next(under_way)
    for send in (producer.try_send, producer.send):
        with pytest.raises(RingMisuse, match="being sent"):
            send(b"x")
    under_way.close()
    assert producer.try_send(b"x") is False  # the fragments are still in the way
    assert drain(consumer) == []
    assert producer.try_send(b"x")
    assert drain(consumer) == [b"x"]


def test_more_than_try_send_takes_points_at_sending(ring: Ring) -> None:
    producer, consumer = ring.claim_producer(), ring.claim_consumer()
    too_much = bytes(producer.max_reserve + 1)
    for call in (lambda: producer.try_send(too_much), lambda: producer.try_reserve(len(too_much))):
        with pytest.raises(MessageTooLarge, match=r"sending\(\)") as caught:
            call()
        assert (caught.value.size, caught.value.limit) == (len(too_much), producer.max_reserve)
    producer.send(too_much)
    assert drain(consumer) == [too_much]


def test_a_message_much_larger_than_the_ring_streams_through_it(ring: Ring) -> None:
    producer, consumer = ring.claim_producer(), ring.claim_consumer()
    big = np.random.default_rng(0).bytes(20 * ring.capacity + 7)
    parks = 0
    for _ in producer.sending(big[:11], memoryview(big)[11:70_000], big[70_000:]):
        parks += 1
        assert consumer.try_recv() is None
        assert ring.statistics().used == 0
    assert parks >= 20
    assert drain(consumer) == [big]
    assert ring.statistics()[2:] == (1, len(big))


def test_closing_a_message_between_fragments_leaves_no_trace_of_it(ring: Ring) -> None:
    producer, consumer = ring.claim_producer(), ring.claim_consumer()
    big = bytes(3 * ring.capacity)
    for then in (b"small", bytes(2 * ring.capacity)):
        for consumed_before_the_close in (True, False):
            parts = producer.sending(big)
            next(parts)
            if consumed_before_the_close:
                assert consumer.try_recv() is None
            parts.close()
            received = []
            for _ in producer.sending(then):
                received += drain(consumer)
            assert received + drain(consumer) == [then]


def test_a_sending_that_waits_for_room_can_be_closed_before_it_sent_anything(ring: Ring) -> None:
    producer, consumer = ring.claim_producer(), ring.claim_consumer()
    while producer.try_send(bytes(64)):
        pass
    parts = producer.sending(b"waits")
    next(parts)
    parts.close()
    assert set(drain(consumer)) == {bytes(64)}


def test_close_lets_the_consumer_drain_and_then_says_so(ring: Ring) -> None:
    producer, consumer = ring.claim_producer(), ring.claim_consumer()
    producer.send(b"one")
    producer.send(b"two")
    producer.close()
    producer.close()
    assert [bytes(consumer.recv(1).data), bytes(consumer.recv(1).data)] == [b"one", b"two"]
    for receive in (consumer.try_recv, consumer.recv):
        with pytest.raises(RingClosed) as caught:
            receive()
        assert caught.value.end == "producer"
    for send in (lambda: producer.try_send(b""), lambda: producer.try_reserve(1), lambda: producer.send(b"")):
        with pytest.raises(RingClosed):
            send()
    with pytest.raises(RingClosed):
        producer.park()


def test_closing_the_producer_between_fragments_ends_the_stream_without_the_message(ring: Ring) -> None:
    producer, consumer = ring.claim_producer(), ring.claim_consumer()
    parts = producer.sending(bytes(3 * ring.capacity))
    next(parts)
    producer.close()
    with pytest.raises(RingClosed):
        consumer.try_recv()
    with pytest.raises(RingClosed):
        next(parts)


def test_a_closed_consumer_stops_the_producer(ring: Ring) -> None:
    producer, consumer = ring.claim_producer(), ring.claim_consumer()
    assert producer.try_reserve(4) is not None
    consumer.close()
    with pytest.raises(RingClosed) as caught:
        producer.commit()
    assert caught.value.end == "consumer"
    with pytest.raises(RingClosed):
        producer.try_send(b"x")
    with pytest.raises(RingClosed):
        consumer.try_recv()
    with pytest.raises(RingClosed):
        consumer.park()


def test_blocking_calls_give_up_in_time_and_leave_the_ring_usable(ring: Ring) -> None:
    producer, consumer = ring.claim_producer(), ring.claim_consumer()
    with pytest.raises(TimeoutError):
        consumer.recv(timeout=0)
    with pytest.raises(TimeoutError):
        producer.send(bytes(5 * ring.capacity), timeout=0)
    assert drain(consumer) == []
    producer.send(b"fine", timeout=0)
    assert drain(consumer) == [b"fine"]


def test_a_reservation_of_less_than_nothing_is_refused(ring: Ring) -> None:
    producer = ring.claim_producer()
    while producer.try_send(b"x"):
        pass
    for n in (-1, -65, -1000):
        with pytest.raises(ValueError, match=f"{n} bytes"):
            producer.try_reserve(n)


@pytest.mark.parametrize("timeout", [float("inf"), 1e12])
def test_a_timeout_may_be_as_long_as_one_likes(ring: Ring, timeout: float) -> None:
    """A sleeper is woken although no single wait may last that long."""
    producer, consumer = ring.claim_producer(), ring.claim_consumer()
    with ThreadPoolExecutor(1) as thread:
        got = thread.submit(lambda: bytes(consumer.recv(timeout).data))
        while not consumer._end.parked:
            time.sleep(0.001)
        producer.send(b"x")
        assert got.result(60) == b"x"


def test_staying_awake_ends_with_the_timeout(ring: Ring) -> None:
    ring.claim_producer()
    with pytest.raises(TimeoutError):
        ring.claim_consumer().recv(timeout=0.0, spin_s=3600.0)
