"""JPEG files of a few kilobytes that take long to decode: they are refused before that, by their bytes."""

from __future__ import annotations

import re

from omni_actors.stages.base import InvalidRequest
from omni_actors.stages.multimodal.limits import Deadline

BEGIN = b"\xff\xd8"
"""The first bytes of a JPEG file."""
SCANNED_PIXELS = 6_400_000_000
"""The most pixels that all scans of a picture may have together.

A scan of ten bytes makes the decoder visit every pixel once more. A scan of 64 megapixels takes it up to 0.05 s, and
twice as long on a busy machine. So the 100 scans that such a picture may have take 5 to 10 s, half of the time that the
media of a request have. Progressive files have about 10 scans, so no photo comes near.
"""
LEAST_PIXELS = 1_000_000
"""What a scan counts at least: it has a cost of its own. So a picture of any size may have 6400 scans."""
EXIF_PIECES = 100
"""The most pieces of EXIF data in a file. Pillow copies all pieces before with each one. Photos have one or two."""

_MARKER = re.compile(rb"\xff[\xc0-\xcf\xd8-\xfe]")
"""Markers, apart from those of restarts, which may be in the middle of a scan. In other data a zero follows 0xff."""
_SCAN, _END = 0xDA, 0xD9


def check_exif(data: bytes, index: int) -> None:
    """Raise InvalidRequest if a file has too many pieces of EXIF data. index: of the image, for the error."""
    if (pieces := data.count(b"Exif\0\0")) > EXIF_PIECES:
        raise _too_slow(f"image {index}: found {pieces} pieces of EXIF data; the limit is {EXIF_PIECES}")


def check_scans(data: bytes, index: int, width: int, height: int, deadline: Deadline) -> None:
    """Raise InvalidRequest if a file has too many scans for its size, or the time is over while they are counted.

    index: of the image, for the error. deadline: of the request.
    """
    most = SCANNED_PIXELS // max(width * height, LEAST_PIXELS)
    # Counting is fast, but finds those of a thumbnail too, and what a video behind the photo has by chance.
    if data.count(b"\xff\xda") > most and (scans := _count_scans(data, index, deadline)) > most:
        raise _too_slow(f"image {index}: found {scans} scans of {width} × {height} pixels; the limit is {most} scans")


def _count_scans(data: bytes, index: int, deadline: Deadline) -> int:
    """Count the scans of the first picture, up to its end, which other pictures or a video may follow."""
    scans, at = 0, len(BEGIN)
    while (found := _MARKER.search(data, at)) and (marker := data[found.start() + 1]) != _END:
        deadline.check("image", index)
        scans += marker == _SCAN
        length = int.from_bytes(data[found.end() : found.end() + 2], "big")  # it counts its own two bytes
        at = found.end() + max(2, length)
    return scans


def _too_slow(message: str) -> InvalidRequest:
    return InvalidRequest(message, param="image", code="image_too_slow")
