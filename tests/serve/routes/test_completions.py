"""/v1/completions, as OpenAI's own client sees it."""

from __future__ import annotations

import openai
import pytest


def test_a_prompt_is_answered(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="studio", prompt="one two")
    [choice] = answer.choices
    assert (answer.object, choice.text, choice.finish_reason) == ("text_completion", "one two" * 3, "stop")


def test_a_prompt_may_be_long(client: openai.OpenAI) -> None:
    [choice] = client.completions.create(model="studio", prompt="word " * 20_000).choices
    assert choice.finish_reason == "stop"


def test_a_stream_gives_the_same_text(client: openai.OpenAI) -> None:
    whole = client.completions.create(model="studio", prompt="one two").choices[0].text
    chunks = list(client.completions.create(model="studio", prompt="one two", stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole
    assert [chunk.choices[0].finish_reason for chunk in chunks][-2:] == [None, "stop"]


def test_an_unknown_field_is_refused_by_name(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="studio", prompt="one", best_of=2)
    assert caught.value.param == "best_of"
