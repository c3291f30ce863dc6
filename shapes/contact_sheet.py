"""Draws every caption with some seeds by the pipeline "shapes", and makes a sheet of pictures and captions.

``python -m shapes.contact_sheet docs/images/shapes.png``: prints how many pictures the classifier recognises.
"""

from __future__ import annotations

import itertools
import sys

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from omni_actors.sync import Omni
from shapes.captions import phrase
from shapes.classifier import shows
from shapes.drawings import COLOURS, SIDE, THINGS

SEEDS = (1, 2)
_LABEL, _GAP = 12, 6
"""Pixels of a caption's line, and between captions."""


def captions() -> list[str]:
    """Return "a red circle" and its like for every thing in every colour."""
    pairs = itertools.product(range(len(THINGS)), range(len(COLOURS)))
    return [_article(phrase(thing, colour, 0)) for thing, colour in pairs]


def _article(name: str) -> str:
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def draw(omni: Omni, prompts: list[str], seed: int, **params: object) -> list[NDArray[np.uint8]]:
    """Return a picture of each prompt: uint8 (SIDE, SIDE, 3)."""
    answers = omni.answer_all(prompts, progress=False, modalities=("image",), seed=seed, **params)
    return [answer.picture.pixels for answer in answers if answer.picture is not None]


def sheet(prompts: list[str], pictures: list[list[NDArray[np.uint8]]]) -> Image.Image:
    """pictures: of each seed, one for each prompt. A row of the sheet has a thing in all colours."""
    width, height = SIDE * len(pictures) + _GAP, SIDE + _LABEL + _GAP
    page = Image.new("RGB", (width * len(COLOURS), height * len(THINGS)), "white")
    draw, font = ImageDraw.Draw(page), ImageFont.load_default(10)
    for place, prompt in enumerate(prompts):
        left, top = place % len(COLOURS) * width, place // len(COLOURS) * height
        for column, drawn in enumerate(pictures):
            page.paste(Image.fromarray(drawn[place]), (left + column * SIDE, top))
        draw.text((left + (width - _GAP) / 2, top + SIDE), prompt, "black", font, anchor="ma")
    return page


def main(file: str) -> None:
    prompts = captions()
    with Omni.open("shapes") as omni:
        pictures = [draw(omni, prompts, seed, negative_prompt="") for seed in SEEDS]
    recognised = [shows(picture, prompt) for drawn in pictures for picture, prompt in zip(drawn, prompts, strict=True)]
    print(f"{sum(recognised)} of {len(recognised)} pictures are recognised")
    sheet(prompts, pictures).quantize(128).save(file, optimize=True)


if __name__ == "__main__":
    main(sys.argv[1])
