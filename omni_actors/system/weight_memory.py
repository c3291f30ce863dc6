"""Weights that a caller gives as tensors: a safetensors file in shared memory, which every worker can open.

The file is a memfd of this process, under ``/proc``. So a worker that starts later reads it too, and nothing of it is
left when this process ends.
"""

from __future__ import annotations

import ctypes
import json
import os
from collections.abc import Callable, Collection, Mapping
from io import BufferedWriter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from omni_actors.errors import InvalidRequest
from ringbuf import Tensor
from ringbuf.syscalls import memfd_create

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
COPY_BYTES = 16 * 1024 * 1024


class _Place(NamedTuple):
    """A tensor in one of the files. offset: of its first byte in the file."""

    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    descriptor: int
    offset: int


class WeightMemory:
    """The files in shared memory, by their paths."""

    def __init__(self) -> None:
        self._files: dict[str, Mapping[str, _Place]] = {}

    def __contains__(self, path: str) -> bool:
        return path in self._files

    def write(self, weights: Mapping[str, Any]) -> Path:
        """Write tensors into a new file, and return its path.

        weights: by name, arrays of numpy or tensors of torch, which are copied; also from another device.
        Raises InvalidRequest (no tensors, or something else), OSError (no memory).
        """
        tensors = {name: _tensor(name, given) for name, given in weights.items()}
        if not tensors:
            raise InvalidRequest("path: no tensors were given", param="path")
        return self._write(tensors, lambda file, name: file.write(tensors[name].data))

    def merge(self, earlier: str, later: str) -> Path:
        """Write a new file with the tensors of two, the later one's where both have a name. Raises OSError."""
        places = {**self._files[earlier], **self._files[later]}
        return self._write(places, lambda file, name: _copy(places[name], file))

    def _write(self, tensors: Mapping[str, Tensor | _Place], write: Callable[[BufferedWriter, str], object]) -> Path:
        """Write a new file. write: writes the bytes of the tensor with this name."""
        descriptor = memfd_create("weights")
        places: dict[str, _Place] = {}
        try:
            with open(descriptor, "wb", closefd=False) as file:
                file.write(_header(tensors))
                for name, tensor in tensors.items():
                    places[name] = _Place(
                        dtype=tensor.dtype,
                        shape=tuple(tensor.shape),
                        nbytes=tensor.nbytes,
                        descriptor=descriptor,
                        offset=file.tell(),
                    )
                    write(file, name)
        except BaseException:
            os.close(descriptor)
            raise
        path = f"/proc/{os.getpid()}/fd/{descriptor}"
        self._files[path] = places
        return Path(path)

    def keep_only(self, paths: Collection[str]) -> None:
        """Free the files that are not at one of these paths."""
        for path in self._files.keys() - set(paths):
            del self._files[path]
            os.close(int(Path(path).name))


def _copy(place: _Place, file: BufferedWriter) -> None:
    """Copy the bytes of a tensor to the end of another file."""
    done = 0
    while done < place.nbytes:
        part = os.pread(place.descriptor, min(COPY_BYTES, place.nbytes - done), place.offset + done)
        done += file.write(part)


def _header(tensors: Mapping[str, Tensor | _Place]) -> bytes:
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
    except (TypeError, ValueError, RuntimeError) as error:  # RuntimeError: a tensor of torch without dense data
        raise InvalidRequest(f"path: {name!r}: a tensor was expected: {error}", param="path") from error
    if tensor.dtype not in DTYPES:
        raise InvalidRequest(f"path: {name!r}: safetensors has no {tensor.dtype}", param="path")
    return tensor
