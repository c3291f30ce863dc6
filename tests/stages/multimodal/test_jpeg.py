"""JPEG files that would take long to decode."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest
from PIL import Image

from omni_actors.stages.base import InvalidRequest
from omni_actors.stages.multimodal.images import decode_image
from omni_actors.stages.multimodal.jpeg import check_scans
from omni_actors.stages.multimodal.limits import Deadline
from tests.support.media_inputs import image_file

pytestmark = pytest.mark.voice  # the extra's libraries

SCAN, END = b"\xff\xda", b"\xff\xd9"
EMPTY = SCAN + struct.pack(">H6B", 8, 1, 1, 0, 1, 63, 0)
"""A scan of the first component that changes nothing."""
MOST = 6400
"""The most scans of a megapixel, and of a smaller picture."""


def photo(width: int = 1000, height: int = 1000, *, scans: int = 0, **options: Any) -> bytes:
    """Return a progressive JPEG with so many empty scans at its end."""
    options = {"progressive": True, **options}
    file = image_file(Image.new("RGB", (width, height), (250, 0, 0)), "JPEG", **options)
    assert file.endswith(END)
    return file[:-2] + EMPTY * scans + END


def segment(marker: int, content: bytes) -> bytes:
    return struct.pack(">BBH", 0xFF, marker, len(content) + 2) + content


def with_segments(file: bytes, *segments: bytes) -> bytes:
    return file[:2] + b"".join(segments) + file[2:]


def decoded(file: bytes) -> Any:
    return decode_image(file, 0, 64_000_000, Deadline(60.0))


def refused(file: bytes) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as refusal:
        decoded(file)
    assert (refusal.value.param, refusal.value.code) == ("image", "image_too_slow")
    return refusal.value


@pytest.mark.parametrize("restarts", [{}, {"restart_marker_rows": 1}])
def test_too_many_scans_are_refused(restarts: dict[str, int]) -> None:
    """A few kilobytes cost as much as 6400 pictures."""
    refusal = refused(photo(scans=MOST, **restarts))
    assert f"found {MOST + 10} scans of 1000 × 1000 pixels; the limit is {MOST} scans" in str(refusal)


def test_a_larger_picture_may_have_fewer_scans() -> None:
    assert "the limit is 1600 scans" in str(refused(photo(2000, 2000, scans=1600)))


def test_a_small_picture_may_not_have_more() -> None:
    refused(photo(8, 8, scans=MOST))
    assert decoded(photo(8, 8, scans=100)).shape == (8, 8, 3)


@pytest.mark.parametrize("between", [b"\0\0\xff\0\xff", segment(0xC4, b""), segment(0xE0, b"\xff\xd9")])
def test_what_is_between_scans_hides_none(between: bytes) -> None:
    refused(photo()[:-2] + (between + EMPTY) * MOST + END)


def test_a_picture_of_one_scan_for_each_component_is_counted_too() -> None:
    """It need not be progressive to have any number of them."""
    frame = struct.pack(">BHHB", 8, 1000, 1000, 3) + bytes((1, 0x11, 0, 2, 0x11, 0, 3, 0x11, 0))
    head = segment(0xDB, bytes([0, *[1] * 64])) + segment(0xC0, frame)
    refused(b"\xff\xd8" + head + EMPTY * (MOST + 1) + END)


@pytest.mark.parametrize("marker", [0xE1, 0xE2, 0xFE])
def test_what_looks_like_scans_in_other_data_is_not_counted(marker: int) -> None:
    """A thumbnail, a profile, a comment; and a video behind the photo, as phones write it."""
    scans = segment(marker, b"Exif\0\0" + SCAN * 4000)
    file = with_segments(photo(), scans, scans)
    assert np.array_equal(decoded(file + SCAN * MOST), decoded(photo()))


def test_a_photo_with_a_thumbnail_and_a_second_picture_is_decoded() -> None:
    exif = Image.Exif()
    exif[0x010E] = photo(64, 64).decode("latin-1")
    pictures = [Image.new("RGB", (40, 30), colour) for colour in ("red", "blue")]
    file = image_file(pictures[0], "MPO", save_all=True, append_images=pictures[1:], exif=exif)
    assert decoded(file)[0, 0].tolist() == [254, 0, 0]
    assert decoded(photo(exif=exif)).shape == (1000, 1000, 3)


def test_counting_scans_ends_with_the_time_of_the_request() -> None:
    """Counting is in Python: 32 MB of empty segments take longer than the media of a request may."""
    file = with_segments(photo(), segment(0xFE, SCAN * (MOST + 1)))
    with pytest.raises(InvalidRequest, match="image 0: decoding the request's media takes more than 0 s") as refusal:
        check_scans(file, 0, 1000, 1000, Deadline(0.0))
    assert refusal.value.code == "image_too_slow"


def test_exif_data_in_too_many_pieces_are_refused() -> None:
    piece = segment(0xE1, b"Exif\0\0" + bytes(10))
    assert "found 101 pieces of EXIF data; the limit is 100" in str(refused(with_segments(photo(), *[piece] * 101)))
    assert decoded(with_segments(photo(), *[piece] * 100)).shape == (1000, 1000, 3)
