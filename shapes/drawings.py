"""Drawings of the things that the model draws: masks of shapes and digits at random places, and their colours."""

from __future__ import annotations

import functools
import math

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

SIDE = 64
"""Pixels of a picture's side."""
COLOURS = {
    "red": (215, 40, 45),
    "orange": (250, 140, 20),
    "yellow": (245, 210, 30),
    "green": (40, 160, 75),
    "blue": (40, 95, 220),
    "purple": (140, 60, 185),
    "black": (25, 25, 30),
}
SHAPES = ("circle", "square", "triangle", "star", "heart", "cross", "moon", "ring")
DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
THINGS = (*SHAPES, *DIGITS)
_SCALE = 4
"""A mask is drawn this many times larger, and reduced: its edges are smooth then."""


def mask(thing: str, random: np.random.Generator) -> NDArray[np.uint8]:
    """Return a drawing at a random place, of random size and rotation: uint8 (SIDE, SIDE), 255 is ink."""
    size = random.uniform(19, 22) * _SCALE
    middle = SIDE * _SCALE / 2 + random.uniform(-2.5, 2.5, 2) * _SCALE
    angle = random.uniform(-0.15, 0.15)
    turn = np.array([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]])
    outlines, holes = _outlines(thing)
    picture = Image.new("L", (SIDE * _SCALE, SIDE * _SCALE))
    draw = ImageDraw.Draw(picture)
    if thing in DIGITS:
        return _digit(thing, size, tuple(middle), angle)
    for points, ink in ((outlines, 255), (holes, 0)):
        if points is not None:
            draw.polygon([tuple(point) for point in points @ turn.T * size + middle], fill=ink)
    return np.asarray(picture.resize((SIDE, SIDE), Image.Resampling.BOX))


def coloured(masks: NDArray[np.uint8], inks: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return the drawings on white: uint8 (n, SIDE, SIDE, 3). masks: (n, SIDE, SIDE). inks: uint8 (n, 3)."""
    ink = masks[..., None].astype(np.float32) / 255
    return (255 - ink * (255.0 - inks[:, None, None, :])).round().astype(np.uint8)


@functools.cache
def _outlines(thing: str) -> tuple[NDArray[np.float64] | None, NDArray[np.float64] | None]:
    """The outline of a shape of radius 1 around the origin, and of its hole; y grows downwards."""
    turn = np.linspace(0, 2 * math.pi, 96, endpoint=False)
    circle = np.stack([np.cos(turn), np.sin(turn)], axis=1)
    match thing:
        case "circle":
            return circle, None
        case "ring":
            return circle, circle * 0.55
        case "moon":
            return circle, circle * 0.85 + (0.5, -0.15)
        case "square":
            return np.array([(-0.85, -0.85), (0.85, -0.85), (0.85, 0.85), (-0.85, 0.85)]), None
        case "triangle":
            return np.array([(0, -1.05), (1.05, 0.8), (-1.05, 0.8)]), None
        case "star":
            tips = np.arange(10) * math.pi / 5 - math.pi / 2
            radius = np.where(np.arange(10) % 2 == 0, 1.15, 0.46)
            return np.stack([np.cos(tips) * radius, np.sin(tips) * radius], axis=1), None
        case "heart":
            x = 16 * np.sin(turn) ** 3
            y = 13 * np.cos(turn) - 5 * np.cos(2 * turn) - 2 * np.cos(3 * turn) - np.cos(4 * turn)
            return np.stack([x, -y - 2], axis=1) / 16, None
        case "cross":
            a, b = 0.33, 1.0
            corners = [(-a, -b), (a, -b), (a, -a), (b, -a), (b, a), (a, a), (a, b), (-a, b)]
            return np.array([*corners, (-a, a), (-b, a), (-b, -a), (-a, -a)]), None
    return None, None


def _digit(thing: str, size: float, middle: tuple[float, ...], angle: float) -> NDArray[np.uint8]:
    """A digit in Pillow's own font; ``size`` is half of its height."""
    side = SIDE * _SCALE
    picture = Image.new("L", (side, side))
    font = ImageFont.load_default(size * 2.7)
    ImageDraw.Draw(picture).text(
        (side / 2, side / 2), str(DIGITS.index(thing)), 255, font, anchor="mm", stroke_width=size / 12
    )
    x, y = middle
    moved = picture.rotate(
        -math.degrees(angle), Image.Resampling.BILINEAR, translate=(int(x - side / 2), int(y - side / 2))
    )
    return np.asarray(moved.resize((SIDE, SIDE), Image.Resampling.BOX))


def bank(each: int, seed: int) -> NDArray[np.uint8]:
    """Return ``each`` drawings of every thing: uint8 (things, each, SIDE, SIDE)."""
    random = np.random.default_rng(seed)
    return np.stack([np.stack([mask(thing, random) for _ in range(each)]) for thing in THINGS])
