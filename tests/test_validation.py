"""The errors of wrong values, in plain words: a request's parameters, as the parent and an engine check them."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
import pytest

from omni_actors import config
from omni_actors.errors import InvalidRequest
from omni_actors.stages.diffusion.options import ImageParams
from omni_actors.stages.refusal import validated
from omni_actors.system.parameters import Parameters
from omni_actors.validation import split_path


@pytest.mark.parametrize(
    ("value", "words"),
    [(0, "max_tokens: expected an integer >= 1"), ("9", "max_tokens: expected an integer, got text")],
)
def test_a_wrong_parameter_is_named_in_plain_words(value: object, words: str) -> None:
    pipeline = config.load("voice")
    with pytest.raises(InvalidRequest) as parents:
        Parameters(pipeline).by_stage(["llm"], {"max_tokens": value})
    schema = pipeline.spec("llm").params
    assert schema is not None
    with pytest.raises(InvalidRequest) as engines:
        validated({"max_tokens": value}, schema)
    assert [(caught.value.message, caught.value.param) for caught in (parents, engines)] == [(words, "max_tokens")] * 2


def test_a_parameter_that_has_a_form_is_refused_with_the_form_in_words() -> None:
    with pytest.raises(InvalidRequest) as caught:
        validated({"size": "large"}, ImageParams)
    assert caught.value.message == "size: expected a size such as '1024x768' or null"
    with pytest.raises(InvalidRequest) as caught:
        validated({"sizes": "large"}, ImageParams)
    assert caught.value.param == "sizes"
    assert caught.value.message.startswith("sizes: unknown field; accepted: ")


class _Odd(msgspec.Struct, forbid_unknown_fields=True):
    """Types that have no words here."""

    pair: tuple[int, ...] | None = None
    kinds: dict[str, ImageParams] = {}
    name: Literal["a"] = "a"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"pair": "a"}, "pair: expected a list or null, got text"),
        ({"kinds": {"a": {"sizes": 1}}}, "kinds[...].sizes: unknown field"),
        ({"name": " - at `key` in `$" * 1000}, "name: Invalid value ' - at `key` in `$"),
        ({"name": " - at `$.pair`"}, "name: Invalid value ' - at `$.pair`'; accepted: 'a'"),
    ],
)
def test_what_cannot_be_explained_is_not_made_up(given: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        validated(given, _Odd)
    assert caught.value.message.startswith(words)


def test_a_wrong_value_that_looks_like_a_place_is_none() -> None:
    message = "Invalid enum value '" + " - at `key` in `$" * 4000 + "'"
    assert split_path(ValueError(message)) == (message, "")
