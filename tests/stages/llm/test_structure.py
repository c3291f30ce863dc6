"""Answers of a given form, by a model whose tokens are random."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from omni_actors.stages.base import InvalidRequest
from omni_actors.stages.llm.engine import LLMEngine
from tests.stages.llm.resumed_answers import check_every_cut
from tests.stages.llm.tiny_engine import PROMPTS, answer
from tests.support.engine_driver import Driver

SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}, "warm": {"type": "boolean"}},
    "required": ["city", "warm"],
    "additionalProperties": False,
}
ASKED: dict[str, tuple[dict[str, Any], Callable[[str], bool]]] = {
    "schema": ({"json": SCHEMA}, lambda text: set(json.loads(text)) == {"city", "warm"}),
    "schema as text": ({"json": json.dumps(SCHEMA)}, lambda text: json.loads(text)["city"] in ("Rome", "Oslo")),
    "regex": ({"regex": "[ab]{3}c"}, lambda text: re.fullmatch("[ab]{3}c", text) is not None),
    "choice": ({"choice": ["yes", "no"]}, lambda text: text in ("yes", "no")),
    "grammar": ({"grammar": 'start: "x" | "yy"'}, lambda text: text in ("x", "yy")),
}


@pytest.mark.parametrize("temperature", [0.0, 1.5])
@pytest.mark.parametrize(("settings", "fits"), ASKED.values(), ids=ASKED)
def test_an_answer_has_the_form_that_was_asked_for(
    engine: LLMEngine, settings: dict[str, Any], fits: Callable[[str], bool], temperature: float
) -> None:
    sampling = {"temperature": temperature, "seed": 5, "max_tokens": 60}
    text, end = answer(engine, PROMPTS[0], structured_outputs=settings, **sampling)
    assert fits(text), text
    assert end["finish_reason"] == "stop"


def test_an_object_begins_as_an_object(engine: LLMEngine) -> None:
    text, _ = answer(engine, PROMPTS[0], structured_outputs={"json_object": True}, max_tokens=5)
    assert text.startswith("{")


def test_a_resumed_answer_keeps_its_form(drive: Callable[..., Driver], engine: LLMEngine, clear_choices: None) -> None:
    params = {"temperature": 1.0, "seed": 3, "max_tokens": 60}
    outputs = check_every_cut(drive(engine), PROMPTS[2], structured_outputs={"json": SCHEMA}, **params)
    assert set(json.loads("".join(output.data["text"] for output in outputs))) == {"city", "warm"}


@pytest.mark.parametrize(
    ("params", "param", "words"),
    [
        ({"structured_outputs": {}}, "structured_outputs", "expected one of"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs", "expected one of"),
        ({"structured_outputs": {"xml": True}}, "structured_outputs", "expected one of"),
        ({"structured_outputs": {"json": 7}}, "structured_outputs", "cannot be used"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs", "cannot be used"),
        ({"structured_outputs": {"json": {"type": "nothing"}}}, "structured_outputs", "cannot be used"),
        ({"structured_outputs": {"json_object": False}}, "structured_outputs", "only true"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs", "cannot be used"),
        ({"structured_outputs": {"regex": 3}}, "structured_outputs", "cannot be used"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs", "a list of texts"),
        ({"structured_outputs": {"grammar": "?"}}, "structured_outputs", "cannot be used"),
        ({"structured_outputs": {"regex": "a"}, "ignore_eos": True}, "ignore_eos", "structure"),
        ({"structured_outputs": {"regex": "a"}, "min_tokens": 2}, "min_tokens", "structure"),
    ],
)
def test_a_form_that_cannot_be_used_is_refused(
    engine: LLMEngine, params: dict[str, Any], param: str, words: str
) -> None:
    with pytest.raises(InvalidRequest, match=words) as caught:
        answer(engine, PROMPTS[0], **params)
    assert caught.value.param == param
