"""The errors of wrong values, in plain words: a request's parameters, as the parent and an engine check them."""

from __future__ import annotations

import pytest

from omni_actors import config
from omni_actors.errors import InvalidRequest
from omni_actors.stages.diffusion.options import ImageParams
from omni_actors.stages.refusal import validated
from omni_actors.system.parameters import Parameters


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
