"""Bytes that are not in this process's memory, and are written straight into a ring."""

from __future__ import annotations

import os

import numpy as np
import pytest

from ringbuf import Deferred, Ring, Snapshot, Tensor, decode_bundle, encode_bundle
from tests.ringbuf.prepared_rings import emptied


class Far(Deferred):
    """Counts how often bytes were copied, and where to."""

    def __init__(self, contents: bytes, copies: list[int]) -> None:
        self._contents, self.nbytes, self.copies = contents, len(contents), copies

    def copy_into(self, view: memoryview) -> None:
        view[:] = self._contents
        self.copies.append(len(view))

    def part(self, start: int, stop: int) -> Far:
        return Far(self._contents[start:stop], self.copies)


class Unreachable(Far):
    def copy_into(self, view: memoryview) -> None:
        raise OSError("the device is gone")


VALUES = np.arange(500, dtype=np.int32)


def test_a_deferred_tensor_is_copied_once_into_the_ring(ring: Ring) -> None:
    far = Far(VALUES.tobytes(), [])
    producer, consumer = ring.claim_producer(), ring.claim_consumer()
    tensors = {"near": VALUES, "far": Tensor("int32", VALUES.shape, far)}
    assert encode_bundle({}, tensors)[-2] is far, "not copied to this process's memory first"
    producer.send(*encode_bundle({"step": 1}, tensors))
    assert far.copies == [VALUES.nbytes]
    with consumer.recv(timeout=0) as frame:
        bundle = decode_bundle(frame.data)
        assert bundle.meta == {"step": 1}
        for tensor in bundle.tensors.values():
            assert (tensor.numpy() == VALUES).all()
        del tensor


@pytest.mark.parametrize("checksums", [False, True])
def test_deferred_bytes_pass_in_fragments_part_by_part(checksums: bool) -> None:
    contents = np.arange(10_000, dtype=np.uint16).tobytes()
    far = Far(contents, [])
    with Ring.create(4096, checksums=checksums) as ring:
        producer, consumer = ring.claim_producer(), ring.claim_consumer()
        received: list[bytes] = []
        for _ in producer.sending(b"before", far, b"behind"):
            received += emptied(consumer)
        received += emptied(consumer)
    assert received == [b"before" + contents + b"behind"]
    assert sum(far.copies) == len(contents)
    assert max(far.copies) <= 1024


def test_a_tensor_that_is_fetched_is_not_copied_from_afar_again() -> None:
    far = Far(VALUES.tobytes(), [])
    tensor = Tensor("int32", VALUES.shape, far)
    assert tensor.nbytes == VALUES.nbytes
    for _ in range(2):
        assert (tensor.numpy() == VALUES).all()
    assert far.copies == [VALUES.nbytes]
    assert isinstance(tensor.buffer, memoryview)
    nothing = Unreachable(b"", [])
    assert Tensor("int32", (0, 3), nothing).fetch().nbytes == 0


def test_of_a_copy_that_fails_nothing_is_sent(ring: Ring) -> None:
    producer, consumer = ring.claim_producer(), ring.claim_consumer()
    with pytest.raises(OSError, match="the device is gone"):
        producer.send(b"front", Unreachable(bytes(100), []))
    assert consumer.try_recv() is None
    producer.send(b"next")
    assert list(emptied(consumer)) == [b"next"]


def test_a_deferred_tensor_of_another_size_is_refused() -> None:
    with pytest.raises(ValueError, match="8 bytes are not int32"):
        Tensor("int32", (3,), Far(bytes(8), []))


def test_a_snapshot_takes_deferred_bytes() -> None:
    snapshot, fd = Snapshot.create(100)
    os.close(fd)
    snapshot.write(memoryview(b"a"), Far(b"far", []))
    frame = snapshot.read()
    assert frame is not None
    assert bytes(frame.data) == b"afar"
    frame.release()
    snapshot.close()
