"""Who holds bytes of the ring, and when they are given back."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from ringbuf import Consumer, Frame, FrameBorrowed, FrameReleased, Producer, Ring, decode_bundle, encode_bundle


def received(producer: Producer, consumer: Consumer, *messages: bytes) -> list[Frame]:
    frames = []
    for message in messages:
        assert producer.try_send(message)
        frame = consumer.try_recv()
        assert frame is not None
        frames.append(frame)
    return frames


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_frames_are_released_in_any_order_and_space_comes_back_in_order(ring: Ring, order: tuple[int, ...]) -> None:
    producer, consumer = ring.claim_producer(), ring.claim_consumer()
    frames = received(producer, consumer, *(bytes([n]) * 64 for n in range(4)))
    released: set[int] = set()
    for n in order:
        assert bytes(frames[n].data) == bytes([n]) * 64
        frames[n].release()
        frames[n].release()
        released.add(n)
        first_held = min(set(range(4)) - released, default=4)
        assert ring.statistics().used == (4 - first_held) * 128


def test_padding_and_fragments_behind_a_held_frame_come_back_with_it(ring: Ring) -> None:
    producer, consumer = ring.claim_producer(), ring.claim_consumer()
    (first,) = received(producer, consumer, bytes(64))
    parts = producer.sending(bytes(ring.capacity))
    next(parts)
    assert consumer.try_recv() is None
    assert ring.statistics().used > ring.capacity // 2
    first.release()
    assert ring.statistics().used == 0
    assert list(parts) == []
    whole = consumer.try_recv()
    assert whole is not None
    assert ring.statistics().used == 0
    assert whole.data.nbytes == ring.capacity


@pytest.mark.parametrize(
    "borrow",
    [
        lambda data: data[1:3],
        lambda data: np.frombuffer(data, np.uint8),
        lambda data: np.asarray(data)[5:],
        lambda data: np.frombuffer(data[8:16], np.uint64).view(np.float64),
        lambda data: memoryview(data).cast("Q"),
    ],
)
def test_a_view_alive_at_release_is_refused_and_the_frame_stays_held(ring: Ring, borrow) -> None:  # type: ignore[no-untyped-def]
    producer, consumer = ring.claim_producer(), ring.claim_consumer()
    (frame,) = received(producer, consumer, b"payload!" * 2)
    borrowed = borrow(frame.data)
    for refused in (frame.release, consumer.close, ring.close):
        with pytest.raises(FrameBorrowed):
            refused()
    assert ring.statistics().used == 128
    assert bytes(frame.data) == b"payload!" * 2
    assert len(borrowed) > 0
    del borrowed
    frame.release()
    assert ring.statistics().used == 0


def test_after_release_the_bytes_cannot_be_looked_at(ring: Ring) -> None:
    producer, consumer = ring.claim_producer(), ring.claim_consumer()
    producer.send(*encode_bundle(None, {"x": np.arange(3)}))
    frame = consumer.recv()
    data = frame.data
    tensor = decode_bundle(data).tensors["x"]
    frame.release()
    with pytest.raises(ValueError, match="released"):
        data[0]
    for look in (lambda: frame.data, lambda: tensor.data, tensor.numpy):
        with pytest.raises(FrameReleased):
            look()


def test_an_array_of_a_bundle_holds_the_frame(ring: Ring) -> None:
    producer, consumer = ring.claim_producer(), ring.claim_consumer()
    producer.send(*encode_bundle(None, {"x": np.arange(3)}))
    frame = consumer.recv()
    array = decode_bundle(frame.data).tensors["x"].numpy()
    with pytest.raises(FrameBorrowed):
        frame.release()
    assert array.tolist() == [0, 1, 2]
    del array
    frame.release()


def test_a_frame_in_private_memory_keeps_the_same_rule(ring: Ring) -> None:
    producer, consumer = ring.claim_producer(), ring.claim_consumer()
    parts = producer.sending(bytes(2 * ring.capacity))
    for _ in parts:
        assert consumer.try_recv() is None
    frame = consumer.recv()
    array = np.frombuffer(frame.data, np.uint8)
    with pytest.raises(FrameBorrowed):
        frame.release()
    assert not array.any()
    del array
    frame.release()


def test_a_frame_may_be_written_to_and_the_neighbours_do_not_notice(ring: Ring) -> None:
    producer, consumer = ring.claim_producer(), ring.claim_consumer()
    first, second = received(producer, consumer, b"aaaa", b"bbbb")
    first.data[:] = b"cccc"
    assert (bytes(first.data), bytes(second.data)) == (b"cccc", b"bbbb")


def test_with_releases_and_reports_what_is_still_borrowed(ring: Ring) -> None:
    producer, consumer = ring.claim_producer(), ring.claim_consumer()
    (frame,) = received(producer, consumer, b"abc")
    with frame:
        assert bytes(frame.data) == b"abc"
    assert ring.statistics().used == 0
    (frame,) = received(producer, consumer, b"abc")
    with pytest.raises(FrameBorrowed), frame:
        kept = frame.data[:1]
    assert bytes(kept) == b"a"
    del kept
    frame.release()


def test_an_error_whose_traceback_holds_arrays_passes_through_with(ring: Ring) -> None:
    producer, consumer = ring.claim_producer(), ring.claim_consumer()
    (frame,) = received(producer, consumer, b"abc")

    def engine(data: memoryview) -> None:
        array = np.frombuffer(data, np.uint8)
        raise LookupError(int(array.sum()))

    with pytest.raises(LookupError), frame:
        engine(frame.data)
    assert ring.statistics().used == 0


def test_closing_releases_the_frames_without_views(ring: Ring) -> None:
    producer, consumer = ring.claim_producer(), ring.claim_consumer()
    frames = received(producer, consumer, b"a", b"b")
    assert bytes(frames[0].data) == b"a"
    ring.close()
    for frame in frames:
        frame.release()
        with pytest.raises(FrameReleased):
            _ = frame.data


def test_names_for_the_data_itself_do_not_borrow_the_frame(ring: Ring) -> None:
    ring.claim_producer().send(b"x")
    frame = ring.claim_consumer().recv()
    names = [frame.data, frame.data]
    frame.release()
    for name in names:
        with pytest.raises(ValueError, match="released"):
            bytes(name)


def test_an_array_of_a_reservation_keeps_the_ring_from_being_unmapped(ring: Ring) -> None:
    view = ring.claim_producer().try_reserve(16)
    assert view is not None
    array = np.frombuffer(view, np.uint8)
    with pytest.raises(FrameBorrowed):
        ring.close()
    assert not array.any()
    assert ring.statistics().used == 0
    del array, view
    ring.close()


def test_an_error_passes_through_with_where_its_own_function_holds_an_array(ring: Ring) -> None:
    producer, consumer = ring.claim_producer(), ring.claim_consumer()
    producer.send(b"x")
    with pytest.raises(ValueError, match="its own") as caught, consumer.recv() as frame:  # noqa: PT012
        array = np.frombuffer(frame.data, np.uint8)
        raise ValueError("its own")
    assert any("still borrowed" in note for note in caught.value.__notes__)
    del array
    frame.release()
