"""What a message is gathered from: bytes of this process, or of a device, which are sent without another copy."""

from __future__ import annotations

from pickle import PickleBuffer
from typing import Any, TypeAlias

import numpy as np


class Deferred:
    """Bytes that are not in this process's memory, such as a device's, and are copied when there is room in a ring.

    They must not change until then. A subclass sets ``nbytes`` and has ``copy_into`` and ``part``. (It is no ABC, whose
    ``isinstance`` is slow.)
    """

    nbytes: int

    def copy_into(self, view: memoryview) -> None:
        """Write all bytes to ``view``, (``nbytes``,), 64-byte aligned or the continuation of such a view.

        When it returns, the copy is complete, and nothing refers to the view. If it raises, nothing is sent.
        """
        raise NotImplementedError

    def part(self, start: int, stop: int) -> Deferred:
        """Return the bytes from ``start`` to ``stop``, not copied."""
        raise NotImplementedError

    def __len__(self) -> int:
        return self.nbytes

    def to_host(self) -> memoryview:
        """Return a copy in private memory."""
        memory = np.empty(self.nbytes, np.uint8).data
        if self.nbytes:
            self.copy_into(memory)
        return memory


Buffer: TypeAlias = "bytes | bytearray | memoryview | np.ndarray[Any, Any] | Deferred"
SendBuffer: TypeAlias = "memoryview | Deferred"
"""A part of an encoded bundle."""
Flat: TypeAlias = "bytes | memoryview | Deferred"


def flat(buffer: Buffer) -> Flat:
    """Return all bytes of a buffer, as one dimension of "B". Raises TypeError (no buffer, or not C-contiguous)."""
    if type(buffer) is bytes or isinstance(buffer, Deferred):
        return buffer
    view = buffer if type(buffer) is memoryview else memoryview(buffer)  # type: ignore[arg-type]  # an array is a buffer; its stubs declare that from Python 3.12 on
    if not view.c_contiguous:
        raise TypeError(f"a buffer of shape {view.shape} and strides {view.strides} is not C-contiguous: copy it first")
    # ``cast`` refuses some formats, and empty shapes.
    return view if view.format == "B" and view.ndim == 1 else PickleBuffer(view).raw()
