"""New weights for an engine that serves, from safetensors files. Nothing of an engine changes here.

Files are named with the size in bytes and the time of the last change in nanoseconds that they must have.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

from safetensors import safe_open
from torch import Tensor

from omni_actors.stages.base import InvalidRequest
from omni_actors.stages.named_files import require_named

Files: TypeAlias = Mapping[str, tuple[int, int]]
Shapes: TypeAlias = Mapping[str, tuple[int, ...]]


def read(files: Files, prefix: str = "") -> dict[str, Tensor]:
    """Return the tensors whose names begin with ``prefix``.

    Raises InvalidRequest: a file is missing, has changed or is damaged.
    """
    tensors: dict[str, Tensor] = {}
    for name, expected in files.items():
        with _opened(Path(name), expected) as file:
            tensors |= {key: file.get_tensor(key) for key in file.keys() if key.startswith(prefix)}  # noqa: SIM118
    return tensors


def shapes(files: Files, prefix: str = "") -> Shapes:
    """Return the shapes of these tensors; the files' headers are read only. Raises as ``read`` does."""
    found: dict[str, tuple[int, ...]] = {}
    for name, expected in files.items():
        with _opened(Path(name), expected) as file:
            keys = [key for key in file.keys() if key.startswith(prefix)]  # noqa: SIM118
            found |= {key: tuple(file.get_slice(key).get_shape()) for key in keys}
    return found


def checkpoint_files(directory: Path) -> Files:
    """Return a checkpoint's own files, as they are now."""
    statuses = {str(path): path.stat() for path in sorted(directory.glob("*.safetensors"))}
    return {name: (status.st_size, status.st_mtime_ns) for name, status in statuses.items()}


def check(found: Shapes, own: Shapes) -> None:
    """Compare new weights with those of the model's own checkpoint, which may have more.

    Raises InvalidRequest: there is no tensor, or one has another name or shape.
    """
    if not found:
        raise InvalidRequest("the files have no weights of the part that this stage computes", param="path")
    for name, shape in found.items():
        if name not in own:
            raise InvalidRequest(f"the model has no weights {name!r}", param="path")
        if shape != own[name]:
            raise InvalidRequest(f"{name}: the model's weights are {own[name]}, found {shape}", param="path")


def check_floating(tensors: Mapping[str, Tensor]) -> None:
    """Raise InvalidRequest if one of the tensors has no floating-point numbers."""
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            raise InvalidRequest(f"{name}: floating-point weights were expected, found {tensor.dtype}", param="path")


def refuse_unless_among_parts(files: Files, parts: Iterable[str]) -> None:
    """Raise InvalidRequest if a tensor belongs to none of these parts of a model."""
    accepted = tuple(f"{part}." for part in parts)
    for name in shapes(files):
        if not name.startswith(accepted):
            raise InvalidRequest(f"the model has no weights {name!r}", param="path")


@contextmanager
def _opened(path: Path, expected: tuple[int, int]) -> Iterator[Any]:
    try:
        status = path.stat()
        with safe_open(path, "pt") as file:
            yield file
    except Exception as error:  # safetensors has errors of its own for damaged files
        raise InvalidRequest(f"{path}: {type(error).__name__}: {error}", param="path") from error
    require_named(path, status, expected)
