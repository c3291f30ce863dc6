"""BAGEL against the numbers of its public reference, which ``make_reference.py`` stored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.stages.bagel import cases
from tests.stages.bagel.driving import Bagel, params_of

pytestmark = pytest.mark.voice

NUMBERS = np.load(Path(__file__).with_name("reference.npz"))


@pytest.mark.parametrize("name", cases.TEXTS)
def test_the_text_has_the_tokens_of_the_reference(bagel: Bagel, name: str) -> None:
    outputs = bagel.write(cases.TEXTS[name], max_tokens=cases.TOKENS - 1)
    expected = NUMBERS[f"{name}/tokens"].tolist()
    tokens = [token for output in outputs for token in output.decisions]
    assert tokens[: len(expected)] == expected


@pytest.mark.parametrize("name", cases.PICTURES)
def test_the_latents_of_each_step_are_those_of_the_reference(bagel: Bagel, name: str) -> None:
    case = cases.PICTURES[name]
    system = [cases.THINK] if case.get("think") else []  # in place of the reference's system prompt
    outputs, checkpoints = bagel.draw([*system, *case["terms"]], **params_of(case))
    expected = NUMBERS[f"{name}/latents"]
    assert len(checkpoints) == len(expected) - 1 == cases.STEPS - 1
    for found, wanted in zip(checkpoints, expected[1:], strict=True):
        np.testing.assert_allclose(found.tensors["latents"], wanted, rtol=0, atol=1e-4)
    picture: Any = outputs[-1].tensors["image"]
    wanted = NUMBERS[f"{name}/picture"].astype(int)
    assert picture.shape == wanted.shape
    assert np.abs(picture.astype(int) - wanted).max() <= 1, "a pixel differs by more than rounding"
    if case.get("think"):
        tokens = NUMBERS[f"{name}/tokens"].tolist()
        assert bagel.thoughts[: len(tokens)] == tokens
