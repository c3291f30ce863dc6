"""The model "shapes" that the package contains: its files, and whether its pictures show what their captions say."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator

import pytest

from omni_actors.stages import assets
from omni_actors.sync import Omni
from shapes import contact_sheet
from shapes.captions import NEW_WORDINGS
from shapes.classifier import shows

MODEL = "qwen-image-shapes"


@pytest.fixture(scope="module")
def omni() -> Iterator[Omni]:
    with Omni.open("shapes") as system:
        yield system


def recognised(omni: Omni, prompts: list[str], seed: int, **params: object) -> float:
    """Return the share of the pictures that show what their captions name."""
    pictures = contact_sheet.draw(omni, prompts, seed, **params)
    return sum(map(shows, pictures, prompts)) / len(prompts)


def test_the_weights_are_those_that_were_tested() -> None:
    directory = assets.resolve(MODEL)
    sums = dict(reversed(line.split()) for line in (directory / "SHA256SUMS").read_text().splitlines())
    weights = {str(file.relative_to(directory)): file for file in directory.glob("*/*.safetensors")}
    assert {name: hashlib.sha256(file.read_bytes()).hexdigest() for name, file in weights.items()} == sums
    assert sum(file.stat().st_size for file in weights.values()) < 5_000_000
    assert json.loads((directory / "model_index.json").read_text())["_class_name"] == "QwenImagePipeline"


@pytest.mark.slow
def test_a_picture_shows_what_its_caption_says(omni: Omni) -> None:
    prompts = ["a red circle", "a green star", "the digit seven in blue", "a purple heart", "a black 4", "Yellow moon."]
    assert recognised(omni, prompts, seed=3, negative_prompt="") == 1


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_pictures_of_all_captions_are_recognised(omni: Omni, seed: int) -> None:
    assert recognised(omni, contact_sheet.captions(), seed, negative_prompt="") >= 0.95


@pytest.mark.slow
def test_other_words_for_a_picture_are_understood(omni: Omni) -> None:
    names = [prompt.split(maxsplit=1)[1] for prompt in contact_sheet.captions()]
    prompts = [NEW_WORDINGS[place % len(NEW_WORDINGS)].format(name) for place, name in enumerate(names)]
    assert recognised(omni, prompts, seed=4, negative_prompt="") >= 0.9


@pytest.mark.slow
def test_guidance_makes_pictures_clearer(omni: Omni) -> None:
    prompts = contact_sheet.captions()[::2]
    assert recognised(omni, prompts, 5, negative_prompt="", guidance=3.0) >= recognised(omni, prompts, 5)
