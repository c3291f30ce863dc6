"""Sleeping and waking. Every test forces its interleaving; none relies on time."""

from __future__ import annotations

import os
import select
from collections.abc import Callable

import pytest

from ringbuf import Consumer, Producer, Ring, RingClosed


def rung(end: Producer | Consumer) -> bool:
    return bool(select.select([end], [], [], 0)[0])


class Interrupted:
    """Shared words that let something happen between two accesses."""

    def __init__(self, words: memoryview, after: int, happen: Callable[[], None]) -> None:
        self._words, self._left, self._happen = words, after, happen
        self.happened = False

    def _step(self) -> None:
        if self._left == 0 and not self.happened:
            self.happened = True
            self._happen()
        self._left -= 1

    def __getitem__(self, index: int) -> int:
        self._step()
        return self._words[index]

    def __setitem__(self, index: int, value: int) -> None:
        self._step()
        self._words[index] = value


def test_send_between_empty_check_and_park_wakes_consumer(ring: Ring) -> None:
    producer, consumer = ring.claim_producer(), ring.claim_consumer()
    assert consumer.try_recv() is None
    assert producer.try_send(b"now")
    assert consumer.park() is False
    producer.send(b"more")
    assert not rung(consumer), "it is awake"
    frame = consumer.try_recv()
    assert frame is not None


@pytest.mark.parametrize("step", range(4))
def test_send_at_any_step_of_park_wakes_consumer(ring: Ring, step: int) -> None:
    producer, consumer = ring.claim_producer(), ring.claim_consumer()
    words = Interrupted(ring._segment.words, step, lambda: producer.send(b"now"))
    consumer._end._words = words  # type: ignore[assignment]
    asleep = consumer.park()
    if not words.happened:
        producer.send(b"now")
    assert not asleep or rung(consumer)
    frame = consumer.try_recv()
    assert frame is not None


@pytest.mark.parametrize("step", range(3))
def test_park_at_any_step_of_send_is_woken(ring: Ring, step: int) -> None:
    producer, consumer = ring.claim_producer(), ring.claim_consumer()
    asleep: list[bool] = []
    words = Interrupted(ring._segment.words, step, lambda: asleep.append(consumer.park()))
    producer._end._words = words  # type: ignore[assignment]
    producer.send(b"now")
    assert words.happened
    assert not asleep[0] or rung(consumer)


@pytest.mark.parametrize("step", range(4))
def test_release_at_any_step_of_waiting_for_space_wakes_producer(ring: Ring, step: int) -> None:
    producer, consumer = ring.claim_producer(), ring.claim_consumer()
    while producer.try_send(bytes(64)):
        pass
    frame = consumer.recv()
    assert not producer.try_send(bytes(64))
    words = Interrupted(ring._segment.words, step, frame.release)
    producer._end._words = words  # type: ignore[assignment]
    asleep = producer.park()
    frame.release()
    assert not asleep or rung(producer)
    producer._end._words = ring._segment.words
    assert producer.try_send(bytes(64))


@pytest.mark.parametrize("step", range(4))
def test_close_at_any_step_of_park_wakes_consumer(ring: Ring, step: int) -> None:
    producer, consumer = ring.claim_producer(), ring.claim_consumer()
    consumer._end._words = Interrupted(ring._segment.words, step, producer.close)  # type: ignore[assignment]
    asleep = consumer.park()
    producer.close()
    assert not asleep or rung(consumer)
    with pytest.raises(RingClosed):
        consumer.try_recv()


def test_the_bell_is_rung_for_a_sleeper_only_and_once(ring: Ring) -> None:
    producer, consumer = ring.claim_producer(), ring.claim_consumer()
    producer.send(b"awake")
    assert not rung(consumer)
    consumer.recv().release()
    assert consumer.park()
    assert not rung(consumer)
    producer.send(b"first")
    producer.send(b"second")
    assert os.eventfd_read(consumer.fileno()) == 1
    frame = consumer.try_recv()
    assert frame is not None
    assert not rung(consumer)
    producer.send(b"third")
    assert not rung(consumer)


def test_a_consumer_woken_for_nothing_parks_again(ring: Ring) -> None:
    producer, consumer = ring.claim_producer(), ring.claim_consumer()
    for _ in range(3):
        assert consumer.park()
        assert consumer.try_recv() is None
    assert consumer.park()
    producer.send(b"")
    assert rung(consumer)


def test_a_producer_is_woken_when_its_message_fits_and_not_before(ring: Ring) -> None:
    producer, consumer = ring.claim_producer(), ring.claim_consumer()
    while producer.try_send(bytes(64)):
        pass
    frames = [consumer.recv() for _ in range(4)]
    parts = producer.sending(bytes(64 + 2 * 128))
    next(parts)
    for frame in frames[:2]:
        frame.release()
        assert not rung(producer)
    frames[2].release()
    assert rung(producer)
    assert list(parts) == []
    assert not rung(producer)
    frames[3].release()
    assert not rung(producer)


@pytest.mark.parametrize("send", [Producer.try_send, Producer.send])
def test_sending_ends_a_park(ring: Ring, send: Callable[[Producer, bytes], object]) -> None:
    producer, consumer = ring.claim_producer(), ring.claim_consumer()
    while producer.try_send(bytes(64)):
        pass
    assert producer.park()
    consumer.recv().release()
    assert rung(producer)
    send(producer, b"x")
    assert not rung(producer)


def test_resuming_early_only_waits_again(ring: Ring) -> None:
    producer, consumer = ring.claim_producer(), ring.claim_consumer()
    while producer.try_send(bytes(64)):
        pass
    parts = producer.sending(b"last")
    for _ in range(3):
        next(parts)
    consumer.recv().release()
    assert list(parts) == []


def test_closing_the_consumer_wakes_a_producer_that_waits_for_space(ring: Ring) -> None:
    producer, consumer = ring.claim_producer(), ring.claim_consumer()
    parts = producer.sending(bytes(2 * ring.capacity))
    next(parts)
    assert not rung(producer)
    consumer.close()
    assert rung(producer)
    with pytest.raises(RingClosed):
        next(parts)


def test_claiming_wakes_a_consumer_that_sleeps(ring: Ring) -> None:
    consumer = ring.claim_consumer()
    assert consumer.park()
    ring.claim_producer()
    assert rung(consumer)


def test_claiming_wakes_a_producer_that_sleeps(ring: Ring) -> None:
    producer = ring.claim_producer()
    parts = producer.sending(bytes(2 * ring.capacity))
    next(parts)
    assert not rung(producer)
    ring.claim_consumer()
    assert rung(producer)


def test_a_signal_handler_that_raises_before_the_bell_is_rung_costs_no_wake_up(
    ring: Ring, monkeypatch: pytest.MonkeyPatch
) -> None:
    producer, consumer = ring.claim_producer(), ring.claim_consumer()
    assert consumer.park()

    def interrupt() -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(producer._end._peer_bell, "ring", interrupt)
        with pytest.raises(KeyboardInterrupt):
            producer.send(b"first")
    producer.send(b"second")
    assert rung(consumer)


def test_a_fence_that_a_signal_handler_interrupted_blocks_no_end(ring: Ring) -> None:
    """It may raise between any two calls, KeyboardInterrupt for one."""
    producer, consumer = ring.claim_producer(), ring.claim_consumer()
    for end in (producer._end, consumer._end):
        end._acquire(False)
    producer.send(b"x")
    assert consumer.park() is False
    with consumer.recv() as frame:
        assert bytes(frame.data) == b"x"
    for end in (producer._end, consumer._end):
        end._acquire(False)
    ring.close()


def test_parking_with_nothing_to_wait_for_is_not_sleep(ring: Ring) -> None:
    producer = ring.claim_producer()
    assert producer.park() is False
    producer.send(b"x")
    assert producer.park() is False
