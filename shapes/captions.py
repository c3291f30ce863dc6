"""Captions of drawings: those that the model is trained on, and wordings that it never saw."""

from __future__ import annotations

import string
from typing import NamedTuple

import numpy as np

from shapes.drawings import COLOURS, DIGITS, THINGS

OPENINGS = ("", "a ", "the ", "one ", "draw ", "draw a ", "please draw the ", "a picture of a ", "an image of the ")
CLOSINGS = ("", "", "", ".", " on white", " please", ", please")
NEW_WORDINGS = (
    "could you paint a {} for me",
    "i would like to see one {} today",
    "sketch of some {}, thank you",
    "{} (centered)",
)
"""Ways to ask that no training caption has."""
_COLOUR_FIRST, _COLOUR_LAST = "{colour} {thing}", "{thing} in {colour}"
WORDS = tuple(
    dict.fromkeys(
        word
        for text in (*OPENINGS, *CLOSINGS, *COLOURS, *THINGS, "digit number in")
        for word in text.strip(".,").replace(",", "").split()
    )
)
"""The words of the captions, which are one token each."""


class Caption(NamedTuple):
    """A text, and the places of what it names in ``COLOURS`` and ``THINGS``. colour: None if it names none."""

    text: str
    thing: int
    colour: int | None


def phrase(thing: int, colour: int | None, form: int) -> str:
    """Return what names the thing and its colour. form: any number; it selects one of the forms."""
    name = THINGS[thing]
    if name in DIGITS:
        name = (f"digit {name}", f"number {name}", name, str(DIGITS.index(name)))[form // 2 % 4]
    if colour is None:
        return name
    return (_COLOUR_FIRST, _COLOUR_LAST)[form % 2].format(colour=tuple(COLOURS)[colour], thing=name)


def draw(random: np.random.Generator) -> Caption:
    """Return a random caption for the training: sometimes with words that mean nothing, in all letter cases."""
    thing = int(random.integers(len(THINGS)))
    colour = int(random.integers(len(COLOURS))) if random.random() < 0.85 else None
    opening, closing = random.choice(OPENINGS), random.choice(CLOSINGS)
    while random.random() < 0.45:
        opening = f"{_babble(random)} {opening}"
    while random.random() < 0.45:
        closing = f"{closing} {_babble(random)}"
    return Caption(f"{opening}{phrase(thing, colour, int(random.integers(8)))}{closing}", thing, colour)


def _babble(random: np.random.Generator) -> str:
    """A word that means nothing, perhaps with a mark before or behind it."""
    before, behind = random.choice(["", "", "", "", "("]), random.choice(["", "", "", ",", ")", "."])
    return f"{before}{''.join(random.choice(list(string.ascii_lowercase), int(random.integers(1, 8))))}{behind}"
