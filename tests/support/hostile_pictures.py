"""Requests for pictures that are out of bounds, and what every engine that makes pictures has to answer."""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Mapping
from typing import Any

import psutil
import pytest

from omni_actors import OmniSystem
from omni_actors.errors import InvalidRequest

GROWTH = 64 << 20
"""Bytes by which a worker may grow: less than the smallest of what these requests ask for."""


def bomb(side: int = 50_000) -> bytes:
    """Return a PNG of a few kilobytes that says it has ``side`` × ``side`` pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(bytes(10**6))) + chunk(b"IEND", b"")


SIZES = ("0x64", "64x0", "33x32", "8192x8192", "99992x99992", "large", "64", "-8x8")
HOSTILE: list[tuple[str, Any]] = [
    *(("size", size) for size in SIZES),
    *(("steps", steps) for steps in (0, -1, 10_000)),
    *(("guidance", guidance) for guidance in (math.nan, math.inf, -1.0, 1e9)),
    *(("prompt", "word " * words) for words in (8000, 4_000_000)),
    ("scheduler", "ddim"),
    ("seed", 2**64),
    *(("image", data) for data in (bomb(), b"GIF89a" + b"\xff" * 4 + b"\0" * 100, b"no picture")),
]
"""The parameter, and a value that no engine accepts."""


async def check_refused(omni: OmniSystem, asked: Mapping[str, Any], *more: tuple[str, Any]) -> None:
    """Each of ``HOSTILE``, and ``more``, is refused by its name, no worker grows, and then ``asked`` is answered.

    asked: a request that is in order. more: parameters of this pipeline, with values that it does not accept.
    """
    workers = [psutil.Process(each.pid) for stage in omni.health().stages.values() for each in stage if each.pid]
    before = [worker.memory_info().rss for worker in workers]
    for param, value in (*HOSTILE, *more):
        with pytest.raises(InvalidRequest) as refusal:
            await omni.generate(**{**asked, param: value}).collect()
        names = (param, "messages") if param == "prompt" else (param,)
        assert refusal.value.param in names, (param, str(value)[:40], refusal.value)
        for worker, size in zip(workers, before, strict=True):
            assert worker.memory_info().rss - size < GROWTH, (param, str(value)[:40])
    assert await omni.generate(**asked).picture() is not None
