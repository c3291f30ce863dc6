"""Several answers in one response: ``n`` of the chat API, and several prompts of the completion API."""

from __future__ import annotations

from typing import Any

import openai
import pytest

HELLO = [{"role": "user", "content": "hello"}]


@pytest.mark.parametrize("n", [2, 5])
def test_choices_come_in_order_whole_and_with_their_index_streamed(client: openai.OpenAI, n: int) -> None:
    asked: Any = {"model": "studio", "messages": HELLO, "n": n}
    answer = client.chat.completions.create(**asked)
    assert [choice.index for choice in answer.choices] == list(range(n))
    assert {choice.message.content for choice in answer.choices} == {"hello" * 3}
    texts, ends = [""] * n, []
    for chunk in client.chat.completions.create(**asked, stream=True):
        [choice] = chunk.choices
        texts[choice.index] += choice.delta.content or ""
        ends += [choice.index] if choice.finish_reason else []
    assert (texts, ends) == (["hello" * 3] * n, list(range(n)))


def test_several_prompts_have_choices_one_after_the_other(client: openai.OpenAI) -> None:
    asked: Any = {"model": "studio", "prompt": ["one", "two"], "n": 2}
    answer = client.completions.create(**asked)
    assert [(choice.index, choice.text) for choice in answer.choices] == [
        (0, "one" * 3),
        (1, "one" * 3),
        (2, "two" * 3),
        (3, "two" * 3),
    ]
    texts = [""] * 4
    for chunk in client.completions.create(**asked, stream=True):
        [choice] = chunk.choices
        texts[choice.index] += choice.text
    assert texts == [choice.text for choice in answer.choices]


def test_more_choices_than_places_are_refused(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="studio", prompt=["one"] * 100, n=100)
    assert (caught.value.param, caught.value.code) == ("n", "too_many_choices")


def test_an_error_of_one_choice_is_the_responses_error(studio: Any) -> None:
    """And the others end: no request stays in flight."""
    body = {"model": "studio", "prompt": ["one", "two"], "seed": 5}
    answer = studio.http.post("/v1/completions", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "seed")
    studio.wait_metric("omni_requests_in_flight", 0)
