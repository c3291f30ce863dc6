from __future__ import annotations

import itertools
import random
import struct
import time
import zlib
from typing import Any

import numpy as np
import pytest
from PIL import Image

from omni_actors.stages.base import InvalidRequest
from omni_actors.stages.multimodal.images import decode_image
from omni_actors.stages.multimodal.limits import Deadline
from tests.support.media_inputs import image_file, noise

pytestmark = pytest.mark.voice  # the extra's libraries

LIMIT = 1_000_000
COLOURS = np.zeros((32, 48, 3), np.uint8)
COLOURS[:16, :24], COLOURS[:16, 24:], COLOURS[16:, :24] = (250, 0, 0), (0, 250, 0), (0, 0, 250)
"""Four quarters of one colour each, which no format changes much."""
PICTURE = Image.fromarray(COLOURS)


def decoded(data: bytes) -> Any:
    pixels = decode_image(data, 0, LIMIT, Deadline(60.0))
    assert pixels.dtype == np.uint8
    return pixels


@pytest.mark.parametrize(
    ("format", "options"),
    [
        *(("PNG", {}), ("BMP", {}), ("GIF", {}), ("AVIF", {"quality": 95}), ("WEBP", {"lossless": True})),
        ("JPEG", {"quality": 95, "subsampling": 0}),
    ],
)
def test_common_formats_are_decoded(format: str, options: Any) -> None:
    pixels = decoded(image_file(PICTURE, format, **options))
    assert pixels.shape == COLOURS.shape
    assert np.abs(pixels.astype(int) - COLOURS).mean() < 4


@pytest.mark.parametrize(("mode", "format"), [("P", "PNG"), ("CMYK", "JPEG"), ("YCbCr", "JPEG"), ("RGBA", "WEBP")])
def test_any_colour_space_becomes_rgb(mode: str, format: str) -> None:
    pixels = decoded(image_file(PICTURE.convert(mode), format))
    assert np.abs(pixels[4:12, 4:20].astype(int) - (250, 0, 0)).mean() < 20


@pytest.mark.parametrize("bits", [1, 8, 16])
def test_grey_images_of_any_depth_are_decoded(bits: int) -> None:
    ramp = np.linspace(0, 255, 256).round().astype(np.uint8)[None].repeat(3, 0)
    picture = {
        1: Image.fromarray(ramp).convert("1", dither=Image.Dither.NONE),
        8: Image.fromarray(ramp),
        16: Image.fromarray(ramp.astype(np.uint16) * 257),
    }[bits]
    expected = np.where(ramp > 127, 255, 0) if bits == 1 else ramp
    pixels = decoded(image_file(picture))
    assert pixels.shape == (3, 256, 3)
    assert np.array_equal(pixels, np.repeat(expected[..., None], 3, -1))


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_transparent_parts_become_white(mode: str) -> None:
    layer = Image.new("RGBA", (4, 2), (0, 0, 0, 0))
    layer.paste((0, 0, 0, 255), (0, 0, 2, 2))
    options = {"transparency": 1} if mode == "P" else {}
    if mode == "P":
        picture = Image.fromarray(np.array([[0, 0, 1, 1]] * 2, np.uint8))
        picture.putpalette([0, 0, 0, 9, 9, 9])
    else:
        picture = layer.convert(mode)
    pixels = decoded(image_file(picture, **options))
    assert pixels[:, :, 0].tolist() == [[0, 0, 255, 255]] * 2


@pytest.mark.parametrize(("orientation", "turns"), [(1, 0), (3, 2), (6, 3), (8, 1)])
def test_a_photo_is_rotated_by_its_exif_orientation(orientation: int, turns: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    pixels = decoded(image_file(PICTURE, exif=exif))
    assert np.array_equal(pixels, np.rot90(COLOURS, turns))


@pytest.mark.parametrize(
    ("format", "options"), [("PNG", {}), ("WEBP", {"lossless": True}), ("JPEG", {"quality": 95, "dpi": (72, 72)})]
)
def test_an_image_with_damaged_exif_data_is_decoded(format: str, options: Any) -> None:
    """A viewer shows it too."""
    file = image_file(PICTURE, format, exif=b"Exif\0\0" + bytes(40), **options)
    assert np.array_equal(decoded(file), decoded(image_file(PICTURE, format, **options)))


def test_a_photo_is_rotated_whatever_else_its_exif_data_have() -> None:
    """Pillow cannot write this one again: its width is a text."""
    tags = ((0x0100, 2, 4, b"abc\0"), (0x0112, 3, 1, b"\6\0\0\0"))
    directory = struct.pack("<H", 2) + b"".join(struct.pack("<HHI4s", *tag) for tag in tags) + bytes(4)
    pixels = decoded(image_file(PICTURE, exif=b"Exif\0\0II*\0" + struct.pack("<I", 8) + directory))
    assert np.array_equal(pixels, np.rot90(COLOURS, 3))


@pytest.mark.parametrize("format", ["GIF", "WEBP", "PNG"])
def test_the_first_picture_of_an_animation_is_decoded(format: str) -> None:
    options = {"lossless": True} if format == "WEBP" else {}
    file = image_file(PICTURE, format, save_all=True, append_images=[Image.new("RGB", PICTURE.size)] * 3, **options)
    assert np.array_equal(decoded(file), COLOURS)


def png(*chunks: bytes) -> bytes:
    """Return a PNG file of these chunks, each with its name first."""
    ends = (struct.pack(">I", len(chunk) - 4) + chunk + struct.pack(">I", zlib.crc32(chunk)) for chunk in chunks)
    return b"\x89PNG\r\n\x1a\n" + b"".join(ends)


def png_header(width: int, height: int) -> bytes:
    return png(b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0), b"IDAT" + zlib.compress(bytes(99)))


GREY, RGB = 0, 2


@pytest.mark.parametrize(
    ("kind", "bits", "row", "transparent", "expected"),
    [
        (GREY, 1, "40", "0001", [0, 255, 0, 0]),
        (GREY, 2, "1b", "0001", [0, 255, 170, 255]),
        (GREY, 2, "1b", "0000", [255, 85, 170, 255]),
        (GREY, 4, "015f", "0005", [0, 17, 255, 255]),
        (GREY, 4, "015f", "0015", [0, 17, 255, 255]),  # the lowest bits count
        (GREY, 8, "000105ff", "0005", [0, 1, 255, 255]),
        (GREY, 16, "0000 1233 1234 ffff", "1234", [0, 0x12, 255, 255]),
        (RGB, 8, "010203 010204 000000 020202", "000100020003", [255, 1, 0, 2]),
        (RGB, 16, "123456789abc 113456789abc 000100020003 010002000300", "123456789abc", [255, 0x11, 0, 1]),
    ],
)
def test_the_transparent_value_of_a_png_of_any_depth_becomes_white(
    kind: int, bits: int, row: str, transparent: str, expected: list[int]
) -> None:
    header = b"IHDR" + struct.pack(">IIBBBBB", 4, 1, bits, kind, 0, 0, 0)
    pixels = b"IDAT" + zlib.compress(b"\0" + bytes.fromhex(row))
    file = png(header, b"tRNS" + bytes.fromhex(transparent), pixels, b"IEND")
    assert decoded(file)[0, :, 0].tolist() == expected


@pytest.mark.parametrize("size", [(1001, 1000), (10_000, 10_000), (1 << 30, 1 << 30)])
def test_an_image_that_is_too_large_is_refused_by_its_header(size: tuple[int, int]) -> None:
    with pytest.raises(InvalidRequest, match="the limit is 1000000 pixels") as refusal:
        decoded(png_header(*size))
    assert (refusal.value.param, refusal.value.code) == ("image", "image_too_large")


@pytest.mark.parametrize(("width", "height"), [(201, 1), (1, 201), (60_000_000, 1)])
def test_an_image_that_is_too_thin_is_refused_by_its_header(width: int, height: int) -> None:
    with pytest.raises(InvalidRequest, match=f"image 0: found {width} × {height} pixels; the limit is a ratio of 200"):
        decode_image(png_header(width, height), 0, 64_000_000, Deadline(60.0))
    assert decoded(image_file(Image.new("RGB", (200, 1)))).shape == (1, 200, 3)


PROFILES = b"iCCP" + b"a\0\0" + zlib.compress(bytes(1 << 20), 9)
"""A profile that takes a thousand times as many bytes as in the file. Pillow decodes each one."""


@pytest.mark.parametrize(
    ("format", "place", "repeated"),
    [
        ("PNG", 33, png(PROFILES)[8:]),
        ("JPEG", 2, b"\xff\xfe\0\2"),
        ("GIF", 13 + 3 * 256, b"!\xfe\1a\0"),
    ],
)
def test_a_file_of_many_small_parts_is_refused_when_the_time_is_over(
    format: str, place: int, repeated: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pillow reads them one by one in Python: 8 MB of profiles take 20 s, and a worker would be ended as hanging."""
    now = itertools.count()
    monkeypatch.setattr(time, "monotonic", lambda: float(next(now)))
    file = image_file(Image.fromarray(noise(20, 30, 3)), format)
    assert decode_image(file, 0, LIMIT, Deadline(1000.0)).shape == (20, 30, 3)
    file = file[:place] + repeated * 1000 + file[place:]
    with pytest.raises(InvalidRequest, match="image 0: decoding the request's media takes more than 1000 s") as refusal:
        decode_image(file, 0, LIMIT, Deadline(1000.0))
    assert (refusal.value.param, refusal.value.code) == ("image", "image_too_slow")


def box(name: bytes, *content: bytes) -> bytes:
    return struct.pack(">I", 8 + sum(map(len, content))) + name + b"".join(content)


def avif_of_many_pictures(side: int, count: int) -> bytes:
    """Return an AVIF file of one red picture, behind as many others that no viewer shows."""
    file = image_file(Image.new("RGB", (side, side), "red"), "AVIF")

    def found(name: bytes) -> bytes:
        begin = file.index(name) - 4
        return file[begin : begin + int.from_bytes(file[begin : begin + 4], "big")]

    data = found(b"mdat")[8:] * (count + 1)
    version, head = bytes(4), box(b"ftyp", b"avif", bytes(4), b"avifmif1miafMA1B")
    properties = [box(b"ispe", version, struct.pack(">II", side, side)), found(b"av1C")]
    association = box(b"ipma", version, struct.pack(">IHBBB", 1, 1, 2, 1, 0x82))

    def meta(place: int) -> bytes:
        location = box(b"iloc", version, b"\x44\0", struct.pack(">HHHHII", 1, 1, 0, 1, place, len(data)))
        handler = box(b"hdlr", version, bytes(4), b"pict", bytes(13))
        item = box(b"infe", b"\2\0\0\0", struct.pack(">HH", 1, 0), b"av01\0")
        items = box(b"pitm", version, b"\0\1") + box(b"iinf", version, b"\0\1", item)
        return box(b"meta", version, handler, items, location, box(b"iprp", box(b"ipco", *properties), association))

    return head + meta(len(head) + len(meta(0)) + 8) + box(b"mdat", data)


def test_an_avif_of_pictures_that_no_viewer_shows_is_refused_when_the_time_is_over() -> None:
    """The decoder computes all of them in one call: 600 KB took a minute, so a worker was ended as hanging."""
    assert decode_image(avif_of_many_pictures(64, 3), 0, LIMIT, Deadline(60.0))[0, 0, 0] > 250
    with pytest.raises(InvalidRequest, match="image 0: decoding the request's media takes more than 2 s") as refusal:
        decode_image(avif_of_many_pictures(4000, 1000), 0, 64_000_000, Deadline(2.0))
    assert (refusal.value.param, refusal.value.code) == ("image", "image_too_slow")


def test_an_avif_is_turned_and_put_on_white_and_refused_by_its_size() -> None:
    exif, layer = Image.Exif(), Image.new("RGBA", (48, 32), (0, 0, 0, 0))
    exif[0x0112] = 6
    layer.paste((0, 0, 0, 255), (0, 0, 24, 32))
    pixels = decoded(image_file(layer, "AVIF", exif=exif, quality=100))
    assert np.array_equal(pixels[..., 0], np.rot90(np.repeat([[0, 255]], 24, 1).repeat(32, 0), 3))
    with pytest.raises(InvalidRequest, match="image 0: found 48 × 32 pixels; the limit is 1000 pixels") as refusal:
        decode_image(image_file(layer, "AVIF"), 0, 1000, Deadline(60.0))
    assert refusal.value.code == "image_too_large"


def test_a_run_length_encoded_bmp_is_refused() -> None:
    """Pillow decodes it byte by byte in Python."""
    body, palette = b"\x01\x05" * 16, bytes(range(256)) * 4
    info = struct.pack("<IiiHHIIiiII", 40, 4, 4, 1, 8, 1, len(body), 0, 0, 256, 0)
    begin = 14 + len(info) + len(palette)
    file = b"BM" + struct.pack("<IHHI", begin + len(body), 0, 0, begin) + info + palette + body
    with pytest.raises(InvalidRequest, match="image 0: this BMP file is run-length encoded; accepted: BMP") as refusal:
        decoded(file)
    assert (refusal.value.param, refusal.value.code) == ("image", "invalid_image")


POSTSCRIPT = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\nshowpage\n"
VECTORS = b'<svg xmlns="http://www.w3.org/2000/svg"><image href="file:///etc/hostname"/></svg>'


@pytest.mark.parametrize(
    "data", [b"no image", image_file(PICTURE)[:-60], image_file(PICTURE, "TIFF"), POSTSCRIPT, VECTORS]
)
def test_a_broken_file_or_another_format_is_refused(data: bytes) -> None:
    with pytest.raises(InvalidRequest, match="image 0: this file cannot be read; accepted: AVIF, BMP") as refusal:
        decoded(data)
    assert (refusal.value.param, refusal.value.code) == ("image", "invalid_image")


@pytest.mark.parametrize("format", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "AVIF"])
def test_a_file_with_any_changed_bytes_is_decoded_or_refused(format: str) -> None:
    rng, file = random.Random(7), image_file(Image.fromarray(noise(20, 30, 3)), format)
    outcomes = set()
    for _ in range(20 if format == "AVIF" else 150):  # AVIF takes a process each
        data = bytearray(file)
        for _ in range(rng.choice((1, 2, 20))):
            data[rng.randrange(min(len(data), rng.choice((40, len(data)))))] = rng.randrange(256)
        try:
            outcomes.add(decoded(bytes(data)).shape[2])
        except InvalidRequest as refusal:
            outcomes.add(refusal.code.partition("_")[0])
    assert outcomes >= {3, "invalid"}
