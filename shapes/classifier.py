"""Tells what a picture shows, independently of the model: trained on drawings only, in a second.

Run by hand: ``python -m shapes.classifier picture.png "a red circle"`` fails if the picture shows something else.
"""

from __future__ import annotations

import functools
import sys
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from shapes.drawings import COLOURS, DIGITS, SIDE, THINGS, bank

_PALETTE = np.array(list(COLOURS.values()), np.float32)
_CELL = 4
"""Pixels of a side of what the kernel compares."""
_WIDTH = 4.0
"""Of the kernel, in cells of full ink that differ."""


class Seen(NamedTuple):
    """What a picture shows. Neither is there if there is no ink."""

    thing: str | None
    colour: str | None


class Classifier:
    """Ridge regression with a Gaussian kernel on coarse masks, and the nearest colour."""

    def __init__(self, each: int = 40, seed: int = 1234) -> None:
        """each: drawings of every thing to train on."""
        masks = bank(each, seed).reshape(-1, SIDE, SIDE).astype(np.float32) / 255
        self._known = _coarse(masks)
        wanted = np.repeat(np.eye(len(THINGS), dtype=np.float32), each, axis=0) * 2 - 1
        kernel = self._kernel(self._known)
        self._weights = np.linalg.solve(kernel + 0.01 * np.eye(len(kernel), dtype=np.float32), wanted)

    def see(self, picture: NDArray[np.uint8]) -> Seen:
        """picture: uint8 (SIDE, SIDE, 3)."""
        ink = ink_of(picture)
        if (ink > 0.5).mean() < 0.01:
            return Seen(None, None)
        scores = self._kernel(_coarse(ink[None])) @ self._weights
        inner = picture[ink > 0.8 * ink.max()].astype(np.float32)
        colour = int(np.square(_PALETTE - np.median(inner, axis=0)).sum(axis=1).argmin())
        return Seen(THINGS[int(scores.argmax())], tuple(COLOURS)[colour])

    def _kernel(self, masks: NDArray[np.float32]) -> NDArray[np.float32]:
        known = self._known
        squares = (masks**2).sum(1)[:, None] + (known**2).sum(1) - 2 * masks @ known.T
        return np.exp(-squares / (2 * _WIDTH))


def ink_of(picture: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Return how much each pixel differs from white, with the most as 1: float32 (SIDE, SIDE)."""
    difference = np.abs(255 - picture.astype(np.float32)).max(axis=2) / 255
    strongest = float(np.quantile(difference, 0.98))
    return np.clip(difference / max(strongest, 0.25), 0, 1)


def _coarse(masks: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return masks with their ink in the middle, in cells: float32 (n, cells)."""
    grid = np.arange(SIDE, dtype=np.float32)
    moved = np.empty_like(masks)
    for place, each in enumerate(masks):
        total = max(float(each.sum()), 1e-6)
        down = round(SIDE / 2 - float((each.sum(1) * grid).sum()) / total)
        right = round(SIDE / 2 - float((each.sum(0) * grid).sum()) / total)
        moved[place] = np.roll(each, (down, right), axis=(0, 1))
    cells = SIDE // _CELL
    coarse: NDArray[np.float32] = moved.reshape(-1, cells, _CELL, cells, _CELL).mean(axis=(2, 4))
    return coarse.reshape(len(masks), -1)


@functools.cache
def trained() -> Classifier:
    """Return the classifier; it is trained once in a process."""
    return Classifier()


def named(caption: str) -> Seen:
    """Return what a caption names."""
    words = caption.lower().replace(",", " ").replace(".", " ").split()
    words = [DIGITS[int(word)] if len(word) == 1 and word.isdigit() else word for word in words]
    # "one" is a number also where it only means "a".
    things = sorted((word for word in words if word in THINGS), key=lambda word: word == "one")
    return Seen(things[0] if things else None, next((word for word in words if word in COLOURS), None))


def shows(picture: NDArray[np.uint8], caption: str) -> bool:
    """Return whether a picture shows what its caption names."""
    seen, wanted = trained().see(picture), named(caption)
    return seen.thing == wanted.thing and wanted.colour in (None, seen.colour)


def main(file: str, caption: str) -> None:
    """Print what a picture shows. Exits with 1 if that is not what the caption names."""
    picture = np.asarray(Image.open(file).convert("RGB"))
    seen = trained().see(picture)
    print(f"{file} shows: {seen.colour} {seen.thing}")
    if not shows(picture, caption):
        sys.exit(f"{file} does not show {caption!r}")


if __name__ == "__main__":
    main(*sys.argv[1:3])
