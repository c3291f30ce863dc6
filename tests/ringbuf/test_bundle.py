"""A bundle comes out as it went in, without a copy; and no bytes at all make the decoder read where it must not."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from ringbuf import BundleCorrupted, Ring, Tensor, decode_bundle, encode_bundle
from ringbuf._bundle import ITEM_SIZES

Array = npt.NDArray[Any]
NUMPY_DTYPES = sorted(set(ITEM_SIZES) - {"bfloat16", "float8_e4m3fn", "float8_e5m2"})

meta_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
arrays = st.sampled_from(NUMPY_DTYPES).flatmap(
    lambda dtype: npst.arrays(np.dtype(dtype), npst.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5))
)


def joined(meta: Any, tensors: dict[str, Any]) -> memoryview:
    return memoryview(bytearray(b"".join(encode_bundle(meta, tensors))))


@given(meta=meta_values, tensors=st.dictionaries(st.text(max_size=5), arrays, max_size=4))
def test_bundles_come_out_as_they_went_in(meta: Any, tensors: dict[str, Array]) -> None:
    data = joined(meta, tensors)
    bundle = decode_bundle(data)
    assert bundle.meta == meta
    assert list(bundle.tensors) == list(tensors)
    assert joined(bundle.meta, bundle.tensors) == data, "what was decoded can be sent on"
    for name, array in tensors.items():
        tensor = bundle.tensors[name]
        assert (tensor.dtype, tensor.shape, tensor.nbytes) == (array.dtype.name, array.shape, array.nbytes)
        assert bytes(tensor.data) == array.tobytes()
        out = tensor.numpy()
        assert (out.dtype, out.shape) == (array.dtype, array.shape)
        assert out.tobytes() == array.tobytes()


def test_a_header_longer_than_the_message_is_refused() -> None:
    good = joined("meta", {})
    length = int.from_bytes(good[:8], "little")
    whole = good[: 8 + length]
    assert decode_bundle(whole).meta == "meta"
    longer = (length + 1).to_bytes(8, "little") + bytes(whole[8:])
    for data in (b"", bytes(7), longer, (9).to_bytes(8, "little") + bytes(8), b"\xff" * 64):
        with pytest.raises(BundleCorrupted, match="a header of"):
            decode_bundle(memoryview(data))


@given(tensors=st.dictionaries(st.text(max_size=3), arrays, max_size=3), data=st.data())
def test_altered_bundles_are_refused_or_stay_inside_their_bytes(tensors: dict[str, Array], data: st.DataObject) -> None:
    good = joined({"n": 1}, tensors)
    altered = bytearray(good[: data.draw(st.integers(0, len(good)))])
    for at in data.draw(st.lists(st.integers(0, max(0, len(altered) - 1)), max_size=4 if altered else 0)):
        altered[at] = data.draw(st.integers(0, 255))
    try:
        bundle = decode_bundle(memoryview(altered))
    except BundleCorrupted:
        return
    for tensor in bundle.tensors.values():
        assert len(tensor.data) == tensor.nbytes


@given(st.binary(max_size=200))
def test_noise_is_refused(noise: bytes) -> None:
    length = len(noise).to_bytes(8, "little")
    for message in (noise, length + noise):
        try:
            bundle = decode_bundle(memoryview(message))
        except BundleCorrupted:
            continue
        assert all(len(tensor.data) == tensor.nbytes for tensor in bundle.tensors.values())


def forged(*header: Any, body: int = 64) -> memoryview:
    encoded = msgspec.msgpack.encode(header)
    front = len(encoded).to_bytes(8, "little") + encoded
    return memoryview(front + bytes(-len(front) % 64 + body))


@pytest.mark.parametrize(
    "entry",
    [
        ("float32", (17,), 0),
        ("float32", (16,), 64),
        ("float32", (1,), 4),
        ("float32", (1,), -64),
        ("float32", (-1,), 0),
        ("float32", (-4, -4), 0),
        ("float32", (2**40, 2**40), 0),
        ("float33", (1,), 0),
        ("object", (1,), 0),
        ("int8", (1,) * 65, 0),
        ("int8", ("1",), 0),
        ("int8", (1,)),
    ],
)
def test_a_tensor_that_does_not_fit_its_bytes_is_refused(entry: tuple[Any, ...]) -> None:
    assert decode_bundle(forged(None, {"x": ("float32", (16,), 0)})).tensors["x"].nbytes == 64
    with pytest.raises(BundleCorrupted):
        decode_bundle(forged(None, {"x": entry}))


def test_an_array_that_is_not_contiguous_or_not_native_travels_as_a_copy_of_its_values() -> None:
    base = np.arange(24, dtype=np.int32).reshape(2, 3, 4)
    odd = {
        "transposed": base.T,
        "strided": base[:, ::2, ::-1],
        "fortran": np.asfortranarray(base),
        "swapped": base.astype(base.dtype.newbyteorder()),
        "broadcast": np.broadcast_to(np.float32(3), (2, 2)),
    }
    out = decode_bundle(joined(None, odd)).tensors
    for name, array in odd.items():
        np.testing.assert_array_equal(out[name].numpy(), array)
        assert out[name].numpy().dtype.isnative


def test_a_contiguous_array_is_not_copied_on_either_side() -> None:
    array = np.zeros(1000, np.float32)
    buffers = encode_bundle(None, {"x": array})
    array[7] = 1.0
    data = memoryview(bytearray(b"".join(buffers)))
    out = decode_bundle(data).tensors["x"].numpy()
    assert out[7] == 1.0
    out[8] = 2.0
    assert decode_bundle(data).tensors["x"].numpy()[8] == 2.0


def test_bfloat16_travels_as_its_bits() -> None:
    bits = np.array([[0x3F80, 0xC000, 0x7FC0]], np.uint16)
    tensor = decode_bundle(joined(None, {"x": Tensor("bfloat16", (1, 3), bits)})).tensors["x"]
    assert (tensor.dtype, tensor.shape) == ("bfloat16", (1, 3))
    assert np.frombuffer(tensor.data, np.uint16).tolist() == bits[0].tolist()
    with pytest.raises(TypeError, match="uint16"):
        tensor.numpy()


def test_a_tensor_checks_its_bytes() -> None:
    assert Tensor("bfloat16", (), b"ab").nbytes == 2
    assert Tensor("float32", (0, 3), b"").numpy().shape == (0, 3)
    for dtype, shape, size in (("float32", (2,), 7), ("float31", (1,), 4), ("int8", (-1, -1), 1), ("int8", (), 0)):
        with pytest.raises(ValueError, match=r"dtype|bytes"):
            Tensor(dtype, shape, bytes(size))
    for array in (np.array(["text"]), np.array([None]), np.array([1], "M8[s]"), np.zeros(1, [("float32", "f4")])):
        with pytest.raises(TypeError, match="do not travel"):
            Tensor.of_numpy(array)


def test_arrays_in_the_ring_are_aligned_and_are_the_ring(ring: Ring) -> None:
    producer, consumer = ring.claim_producer(), ring.claim_consumer()
    sent = {f"{n}": np.arange(n, dtype=np.int16) for n in (0, 1, 31, 32, 33, 500)}
    producer.send(*encode_bundle({"step": 1}, sent))
    frame = consumer.recv()
    bundle = decode_bundle(frame.data)
    for name, tensor in bundle.tensors.items():
        out = tensor.numpy()
        np.testing.assert_array_equal(out, sent[name])
        if out.size:
            assert out.ctypes.data % 64 == 0
            assert np.shares_memory(out, np.frombuffer(ring._segment.data, np.uint8))
    del out
    frame.release()


packed = st.recursive(
    st.none()
    | st.integers(-(2**63), 2**64 - 1)
    | st.text(max_size=3)
    | st.binary(max_size=3)
    | st.just("int8")
    | st.just(0),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=2) | st.integers(0, 9), inner, max_size=3)
    ),
    max_leaves=12,
)
dimensions = st.integers(0, 3) | st.sampled_from([2**31, 2**32, 2**62, 2**63, 2**64 - 1, -1])
entries = st.tuples(
    st.sampled_from(["int8", "float64", "complex128", "bfloat16", "bool", "O", ""]),
    st.lists(dimensions, max_size=5) | st.lists(st.integers(0, 1), min_size=60, max_size=70),
    st.sampled_from([0, 64, 128, 1, -64, 2**63, 2**64 - 64]),
)


@settings(max_examples=150)
@given(
    header=st.one_of(
        packed,
        st.lists(packed, min_size=2, max_size=2),
        st.tuples(packed, st.dictionaries(st.text(max_size=2), entries | packed, max_size=3)),
    ),
    body=st.integers(0, 300),
    cut=st.integers(0, 20),
    flips=st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), max_size=3),
)
def test_bundles_of_any_header(header: Any, body: int, cut: int, flips: list[tuple[int, int]]) -> None:
    encoded = msgspec.msgpack.encode(header)
    message = bytearray(len(encoded).to_bytes(8, "little") + encoded)
    message += bytes(-len(message) % 64 + body)
    for at, value in flips:
        message[at % len(message)] = value
    data = memoryview(message)[: len(message) - cut]
    try:
        bundle = decode_bundle(data)
    except BundleCorrupted:
        return
    for tensor in bundle.tensors.values():
        assert len(tensor.data) == tensor.nbytes <= len(data)
        if tensor.dtype != "bfloat16":
            assert tensor.numpy().nbytes == tensor.nbytes


@pytest.mark.parametrize("shape", [(0, 2**63), (2**64 - 1, 0), (2**40, 0, 2**40)])
def test_an_empty_tensor_whose_other_dimensions_are_absurd_is_refused(shape: tuple[int, ...]) -> None:
    encoded = msgspec.msgpack.encode((None, {"x": ("int8", shape, 0)}))
    with pytest.raises(BundleCorrupted, match="empty"):
        decode_bundle(memoryview(len(encoded).to_bytes(8, "little") + encoded))


def test_a_torch_view_of_bfloat16_is_the_ring_s_own_memory(ring: Ring) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    producer, consumer = ring.claim_producer(), ring.claim_consumer()
    values = torch.arange(6, dtype=torch.bfloat16).reshape(2, 3) / 3
    producer.send(*encode_bundle(None, {"x": Tensor("bfloat16", (2, 3), values.view(torch.uint8).numpy().tobytes())}))
    frame = consumer.recv()
    tensor = decode_bundle(frame.data).tensors["x"]
    view = torch.frombuffer(tensor.data, dtype=torch.bfloat16).reshape(tensor.shape)
    assert torch.equal(view, values)
    view[0, 0] = 7
    assert bytes(tensor.data[:2]) == torch.tensor([7], dtype=torch.bfloat16).view(torch.uint8).numpy().tobytes()
    del view, tensor
    frame.release()


@pytest.mark.parametrize("offset", [-64, -1, 1, 63, 64])
def test_a_tensor_at_an_offset_outside_the_body_or_not_aligned_is_refused(offset: int) -> None:
    for at in (0, offset):
        encoded = msgspec.msgpack.encode((None, {"x": ("int8", (64,), at)}))
        message = len(encoded).to_bytes(8, "little") + encoded
        message += bytes(-len(message) % 64 + 64)
        if at:
            with pytest.raises(BundleCorrupted, match=f"64 bytes at {at} of a body of 64"):
                decode_bundle(memoryview(message))
        else:
            assert decode_bundle(memoryview(message)).tensors["x"].nbytes == 64
