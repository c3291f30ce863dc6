"""What the echo engine does with new weights: it reads the files as a real engine does, and keeps nothing of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from omni_actors.stages.base import InvalidRequest
from omni_actors.stages.named_files import require_named


def count_tensors(files: Mapping[str, tuple[int, int]]) -> int:
    """Return the number of tensors in safetensors files. files: see ``stages.weights``.

    Raises InvalidRequest: a file is missing, has changed or is damaged.
    """
    return sum(_count(Path(name), expected) for name, expected in files.items())


def _count(path: Path, expected: tuple[int, int]) -> int:
    try:
        status = path.stat()
        content = path.read_bytes()
        begin = 8 + int.from_bytes(content[:8], "little")
        entries = json.loads(content[8:begin])
        entries.pop("__metadata__", None)
        whole = begin + max((entry["data_offsets"][1] for entry in entries.values()), default=0) == len(content)
    except (OSError, ValueError, AttributeError, KeyError, IndexError, TypeError) as error:
        raise InvalidRequest(f"{path}: {type(error).__name__}: {error}", param="path") from error
    require_named(path, status, expected)
    if not whole:
        raise InvalidRequest(f"{path} is damaged: its size is not that of its tensors", param="path")
    return len(entries)
