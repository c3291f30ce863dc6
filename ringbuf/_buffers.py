"""The bytes of an object with a C-contiguous buffer, which may be sent without a copy."""

from __future__ import annotations

from pickle import PickleBuffer
from typing import Any, TypeAlias

import numpy as np

Buffer: TypeAlias = "bytes | bytearray | memoryview | np.ndarray[Any, Any]"


def flat(buffer: Buffer) -> bytes | memoryview:
    """Return all bytes of a buffer, as one dimension of "B". Raises TypeError (no buffer, or not C-contiguous)."""
    if type(buffer) is bytes:
        return buffer
    view = buffer if type(buffer) is memoryview else memoryview(buffer)  # type: ignore[arg-type]  # an array is a buffer; its stubs declare that from Python 3.12 on
    if not view.c_contiguous:
        raise TypeError(f"a buffer of shape {view.shape} and strides {view.strides} is not C-contiguous: copy it first")
    # ``cast`` refuses some formats, and empty shapes.
    return view if view.format == "B" and view.ndim == 1 else PickleBuffer(view).raw()
