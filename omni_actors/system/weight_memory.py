"""Weights that a caller gives as tensors: a safetensors file in shared memory, which every worker can open.

The file is a memfd of this process, under ``/proc``. So a worker that starts later reads it too, and nothing of it is
left when this process ends.
"""

from __future__ import annotations

import ctypes
import json
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from omni_actors.errors import InvalidRequest
from ringbuf import Tensor

DTYPES = {
    "bool": "BOOL",
    "int8": "I8",
    "int16": "I16",
    "int32": "I32",
    "int64": "I64",
    "uint8": "U8",
    "uint16": "U16",
    "uint32": "U32",
    "uint64": "U64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}
"""The names of dtypes in safetensors files."""
ALIGNMENT = 8


class WeightMemory:
    """The files in shared memory, by their paths."""

    def __init__(self) -> None:
        self._descriptors: dict[str, int] = {}

    def write(self, weights: Mapping[str, Any]) -> Path:
        """Write tensors into a new file, and return its path.

        weights: by name, arrays of numpy or tensors of torch, which are copied; also from another device.
        Raises InvalidRequest (no tensors, or something else), OSError (no memory).
        """
        tensors = {name: _tensor(name, given) for name, given in weights.items()}
        if not tensors:
            raise InvalidRequest("path: no tensors were given", param="path")
        descriptor = os.memfd_create("weights", os.MFD_CLOEXEC)
        try:
            with open(descriptor, "wb", closefd=False) as file:
                file.write(_header(tensors))
                for tensor in tensors.values():
                    file.write(tensor.data)
        except BaseException:
            os.close(descriptor)
            raise
        path = f"/proc/{os.getpid()}/fd/{descriptor}"
        self._descriptors[path] = descriptor
        return Path(path)

    def keep_only(self, paths: Collection[str]) -> None:
        """Free the files that are not at one of these paths."""
        for path in self._descriptors.keys() - set(paths):
            os.close(self._descriptors.pop(path))


def _header(tensors: Mapping[str, Tensor]) -> bytes:
    """Return the beginning of a safetensors file: its length, and what it has where."""
    entries, offset = {}, 0
    for name, tensor in tensors.items():
        end = offset + tensor.nbytes
        entries[name] = {"dtype": DTYPES[tensor.dtype], "shape": tensor.shape, "data_offsets": (offset, end)}
        offset = end
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def _tensor(name: str, given: Any) -> Tensor:
    """Return an array, or a tensor of torch, which this process does not import, as a ``Tensor`` on its bytes."""
    try:
        if not hasattr(given, "detach"):
            tensor = Tensor.of_numpy(np.asarray(given))
        else:
            given = given.detach().cpu().contiguous()
            layout = ctypes.c_ubyte * given.nbytes
            data = layout.from_address(given.data_ptr()) if given.nbytes else layout()
            data.owner = given  # the bytes are valid as long as the tensor lives
            tensor = Tensor(str(given.dtype).removeprefix("torch."), tuple(given.shape), memoryview(data))
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"path: {name!r}: a tensor was expected: {error}", param="path") from error
    if tensor.dtype not in DTYPES:
        raise InvalidRequest(f"path: {name!r}: safetensors has no {tensor.dtype}", param="path")
    return tensor
