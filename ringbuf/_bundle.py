"""A bundle: small metadata and named arrays in one message, read in place.

    off        size    field
      0           8    bytes of the header, little-endian
      8      header    msgpack [meta, {name: [dtype, shape, offset]}]
    align 64           body: each array's raw bytes (C order, little-endian), at ``offset`` from here, a multiple of 64

Rule 1: encoding copies no array: it gives a list of buffers to gather, so the copy into the ring is the only one.
Rule 2: decoding copies nothing, and checks every length, shape and offset against the bytes that have arrived.
Rule 3: a dtype is a name. numpy lacks some of them (bfloat16), so a tensor is dtype, shape and bytes before it is an
array.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
import numpy as np

from ringbuf._buffers import Buffer, Deferred, SendBuffer, flat
from ringbuf._errors import BundleCorrupted, FrameReleased

ALIGN: Final = 64
_ZEROS: Final = memoryview(bytes(ALIGN))
_MAX_DIMS: Final = 64

ITEM_SIZES: Final[Mapping[str, int]] = {
    "bool": 1,
    "int8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "uint8": 1,
    "uint16": 2,
    "uint32": 4,
    "uint64": 8,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "complex64": 8,
    "complex128": 16,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
}
"""The bytes of one item, by the dtype's name in numpy and torch."""

_NOT_NUMPY: Final = {"bfloat16": "uint16", "float8_e4m3fn": "uint8", "float8_e5m2": "uint8"}


class Tensor:
    """An array without a library: dtype name, shape and bytes (C order), which are not copied.

    ``data`` may be ``Deferred``: such bytes are copied straight into a ring, or to this process's memory by ``fetch``.
    Raises ValueError (unknown dtype, or not as many bytes as the shape takes), TypeError (not contiguous).
    """

    __slots__ = ("_source", "_start", "_stop", "dtype", "shape")

    dtype: str
    shape: tuple[int, ...]

    def __init__(self, dtype: str, shape: Sequence[int], data: Buffer) -> None:
        source = flat(data)
        view = source if isinstance(source, Deferred) else memoryview(source)
        if dtype not in ITEM_SIZES:
            raise ValueError(f"unknown dtype {dtype!r}; known: {', '.join(ITEM_SIZES)}")
        if min(shape, default=0) < 0 or math.prod(shape) * ITEM_SIZES[dtype] != len(view):
            raise ValueError(f"{len(view)} bytes are not {dtype} of shape {tuple(shape)}")
        self.dtype, self.shape = dtype, tuple(shape)
        self._source: SendBuffer = view
        self._start, self._stop = 0, len(view)

    @classmethod
    def _window(cls, dtype: str, shape: tuple[int, ...], source: memoryview, start: int, stop: int) -> Tensor:
        tensor = cls.__new__(cls)
        tensor.dtype, tensor.shape = dtype, shape
        tensor._source, tensor._start, tensor._stop = source, start, stop
        return tensor

    @staticmethod
    def of_numpy(array: np.ndarray[Any, Any]) -> Tensor:
        """Return a tensor on the array's own memory, or on a copy unless that is C-contiguous and of native byte order.

        Raises TypeError (a dtype without a name here: objects, strings, dates, records).
        """
        name = _name_of(array.dtype)
        if name is None:
            raise TypeError(f"arrays of dtype {array.dtype} do not travel; those that do: {', '.join(ITEM_SIZES)}")
        native = array.dtype if array.dtype.isnative else array.dtype.newbyteorder("=")
        plain = np.asarray(array, dtype=native, order="C")
        data = plain.reshape(-1).view(np.uint8).data
        return Tensor._window(name, plain.shape, data, 0, len(data))

    @property
    def data(self) -> memoryview:
        """Return the bytes, flat: (``nbytes``,). Each view borrows the frame. Raises FrameReleased."""
        source = self._source if type(self._source) is memoryview else self.fetch()
        try:
            return source[self._start : self._stop]
        except ValueError as error:
            raise FrameReleased from error

    def fetch(self) -> memoryview:
        """Copy deferred bytes to this process's memory, once; the tensor then refers to the copy alone."""
        source = self._source
        if isinstance(source, Deferred):
            source = self._source = source.to_host()
        return source

    @property
    def buffer(self) -> SendBuffer:
        """Return what is sent: ``data``, or the deferred bytes."""
        return self._source if isinstance(self._source, Deferred) else self.data

    @property
    def nbytes(self) -> int:
        return self._stop - self._start

    def numpy(self) -> np.ndarray[Any, Any]:
        """Return an array on the same bytes. Raises TypeError for a dtype that numpy lacks, FrameReleased."""
        if (substitute := _NOT_NUMPY.get(self.dtype)) is not None:
            raise TypeError(
                f"numpy has no {self.dtype}: use np.frombuffer(tensor.data, np.{substitute}) for the bits, "
                f"or a torch tensor made from tensor.data"
            )
        return np.frombuffer(self.data, self.dtype).reshape(self.shape)

    def __repr__(self) -> str:
        return f"<Tensor {self.dtype} {self.shape}>"


@functools.lru_cache(maxsize=256)
def _name_of(dtype: np.dtype[Any]) -> str | None:
    """Return the name of a dtype; None if its arrays do not travel. numpy makes the name anew each time."""
    return dtype.name if dtype.name in ITEM_SIZES else None


class Bundle(msgspec.Struct, eq=False):
    """``meta`` as it was sent; ``tensors`` are views of the bytes that were decoded."""

    meta: Any
    tensors: dict[str, Tensor]


class _Header(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    meta: Any
    tensors: dict[str, tuple[str, tuple[int, ...], int]]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Header)


def encode_bundle(meta: Any, tensors: Mapping[str, np.ndarray[Any, Any] | Tensor]) -> list[SendBuffer]:
    """Return buffers that, one after the other, are the bundle. ``try_send(*...)`` or ``sending(*...)`` copies them.

    meta: anything that msgpack carries. The arrays must not change before they are sent.
    Raises TypeError (meta or a dtype that cannot be encoded).
    """
    entries: dict[str, tuple[str, tuple[int, ...], int]] = {}
    body: list[SendBuffer] = []
    offset = 0
    for name, given in tensors.items():
        tensor = given if isinstance(given, Tensor) else Tensor.of_numpy(given)
        entries[name] = (tensor.dtype, tensor.shape, offset)
        if nbytes := tensor.nbytes:
            body.append(tensor.buffer)
        if pad := -nbytes % ALIGN:
            body.append(_ZEROS[:pad])
        offset += nbytes + pad
    header = _encoder.encode(_Header(meta, entries))
    front = len(header).to_bytes(8, "little") + header
    return [memoryview(front + bytes(-len(front) % ALIGN)), *body]


def decode_bundle(data: memoryview) -> Bundle:
    """Return the bundle in ``data`` (bytes, flat). Its tensors are views of ``data``. Raises BundleCorrupted."""
    size = len(data)
    length = int.from_bytes(data[:8], "little")
    if size < 8 or length > size - 8:
        raise BundleCorrupted(f"a header of {length} bytes in a message of {size}")
    try:
        header = _decoder.decode(data[8 : 8 + length])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BundleCorrupted(f"its header: {error}") from error
    body = 8 + length + -(8 + length) % ALIGN
    tensors: dict[str, Tensor] = {}
    for name, (dtype, shape, offset) in header.tensors.items():
        if dtype not in ITEM_SIZES or len(shape) > _MAX_DIMS or min(shape, default=0) < 0:
            raise BundleCorrupted(f"tensor {name!r} of dtype {dtype!r} and shape {shape}")
        nbytes = math.prod(shape) * ITEM_SIZES[dtype]
        if not nbytes and math.prod(filter(None, shape)) * ITEM_SIZES[dtype] >> 63:
            raise BundleCorrupted(f"tensor {name!r}: no library has an array of shape {shape}, though it is empty")
        if offset < 0 or offset % ALIGN or (nbytes and body + offset + nbytes > size):
            raise BundleCorrupted(f"tensor {name!r}: {nbytes} bytes at {offset} of a body of {max(0, size - body)}")
        start = body + offset if nbytes else 0
        tensors[name] = Tensor._window(dtype, shape, data, start, start + nbytes)
    return Bundle(header.meta, tensors)
