"""The drawings that the model "shapes" is trained on, their captions, and the classifier that judges its pictures."""

from __future__ import annotations

import numpy as np
import pytest

from shapes import captions, classifier, contact_sheet, text
from shapes.drawings import COLOURS, SIDE, THINGS, bank, coloured


def test_the_classifier_recognises_drawings_that_it_was_not_trained_on() -> None:
    inks = list(COLOURS)
    judge = classifier.trained()
    for thing, masks in zip(THINGS, bank(each=7, seed=77), strict=True):
        for colour, picture in zip(inks, coloured(masks, np.array(list(COLOURS.values()), np.uint8)), strict=True):
            assert judge.see(picture) == (thing, colour)


def test_a_picture_without_ink_shows_nothing() -> None:
    assert classifier.trained().see(np.full((SIDE, SIDE, 3), 250, np.uint8)) == (None, None)


@pytest.mark.parametrize(
    ("caption", "seen"),
    [
        ("a red circle", ("circle", "red")),
        ("please draw the digit 7 in blue.", ("seven", "blue")),
        ("one green star", ("star", "green")),
        ("the number one", ("one", None)),
        ("something", (None, None)),
    ],
)
def test_a_caption_names_a_thing_and_perhaps_a_colour(caption: str, seen: tuple[str | None, str | None]) -> None:
    assert classifier.named(caption) == seen


def test_every_caption_names_what_it_was_drawn_for() -> None:
    random = np.random.default_rng(0)
    for caption in (captions.draw(random) for _ in range(200)):
        named = classifier.named(caption.text)
        assert named.thing == THINGS[caption.thing]
        assert named.colour == (None if caption.colour is None else list(COLOURS)[caption.colour])


def test_a_word_is_one_token_and_qwen_image_drops_the_whole_instruction() -> None:
    tokens = text.tokenizer()
    before = text.TEMPLATE.partition("{}")[0]
    assert len(tokens(before).input_ids) == text.DROPPED
    for word in captions.WORDS:
        assert all(len(tokens(form).input_ids) == 1 for form in (word, word.capitalize(), f" {word}"))


def test_the_contact_sheet_has_each_picture_with_its_caption() -> None:
    prompts = contact_sheet.captions()
    assert prompts[:2] == ["a red circle", "an orange circle"]
    assert len(set(prompts)) == len(prompts) == len(THINGS) * len(COLOURS)
    blank = [np.zeros((SIDE, SIDE, 3), np.uint8)] * len(prompts)
    sheet = contact_sheet.sheet(prompts, [blank, blank])
    assert sheet.width % len(COLOURS) == 0
    assert sheet.height % len(THINGS) == 0
