"""What only a language model can do, over HTTP: a tiny one with random weights whose chat template knows tools."""

from __future__ import annotations

import base64
import json
import os
import signal
from collections.abc import Iterator
from typing import Any

import numpy as np
import openai
import pytest

from omni_actors.serve.api.logprobs import chat_logprobs, completion_logprobs
from tests.support.http_server import Server, Start

HELLO: Any = [{"role": "user", "content": "hello"}]
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Rome", "Oslo"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
HUGE: Any = {"type": "function", "function": {"name": "f", "parameters": {"type": "integer", "maximum": 2**64}}}
"""A tool whose schema has a number that no message can carry."""
FORMAT: Any = {
    "type": "json_schema",
    "json_schema": {"name": "weather", "schema": WEATHER["function"]["parameters"]},
}


@pytest.fixture
def client(writer: Server) -> Iterator[openai.OpenAI]:
    with writer.openai() as client:
        yield client


def ask(client: openai.OpenAI, **arguments: Any) -> Any:
    return client.chat.completions.create(**{"model": "writer", "messages": HELLO, "max_tokens": 12, **arguments})


def test_log_probabilities_of_a_chat(client: openai.OpenAI) -> None:
    asked: Any = {"logprobs": True, "top_logprobs": 3, "temperature": 1.0, "seed": 4}
    [choice] = ask(client, **asked).choices
    assert len(choice.logprobs.content) == 12
    for entry in choice.logprobs.content:
        assert len(entry.top_logprobs) == 3
        assert [top.logprob for top in entry.top_logprobs] == sorted(
            (t.logprob for t in entry.top_logprobs), reverse=True
        )
        assert entry.logprob <= entry.top_logprobs[0].logprob <= 0
        assert entry.bytes is None if "\ufffd" in entry.token else bytes(entry.bytes).decode() == entry.token
    streamed = [chunk.choices[0].logprobs for chunk in ask(client, stream=True, **asked)]
    entries = [entry for logprobs in streamed if logprobs for entry in logprobs.content]
    assert [entry.token for entry in entries] == [entry.token for entry in choice.logprobs.content]


def test_log_probabilities_of_a_completion(client: openai.OpenAI) -> None:
    [choice] = client.completions.create(model="writer", prompt="hello", max_tokens=5, logprobs=2).choices
    assert len(choice.logprobs.tokens) == len(choice.logprobs.token_logprobs) == 5
    assert choice.logprobs.text_offset == [sum(map(len, choice.logprobs.tokens[:at])) for at in range(5)]
    assert all(len(top) in (1, 2) for top in choice.logprobs.top_logprobs)


def test_the_bytes_of_a_part_of_a_character_are_not_known() -> None:
    texts = ["\ufffd", "a", "\ufffd", "é"]
    position = [{"token_id": at, "logprob": -1.0 - at, "rank": at + 1, "token": text} for at, text in enumerate(texts)]
    [entry] = chat_logprobs([position], 4)["content"]
    assert [each["bytes"] for each in (entry, *entry["top_logprobs"])] == [None, None, [97], None, [0xC3, 0xA9]]
    for order in (position, [position[2], *position]):
        assert completion_logprobs([order], 0)["top_logprobs"] == [{"\ufffd": -1.0, "a": -2.0, "é": -4.0}]


def test_a_completion_continues_the_raw_text_or_its_token_ids(client: openai.OpenAI) -> None:
    tokenized: Any = client.post("/../tokenize", body={"prompt": "hello there"}, cast_to=object)
    asked: Any = {"model": "writer", "max_tokens": 8, "temperature": 0.0}
    of_text = client.completions.create(prompt="hello there", **asked)
    of_tokens = client.completions.create(prompt=[tokenized["tokens"]] * 2, **asked)
    assert of_text.usage is not None
    assert of_text.usage.prompt_tokens == tokenized["count"]
    assert [choice.text for choice in of_tokens.choices] == [of_text.choices[0].text] * 2
    assert client.completions.create(prompt=tokenized["tokens"], **asked).choices[0].text == of_text.choices[0].text
    bare = client.completions.create(prompt="hello there", extra_body={"add_special_tokens": False}, **asked)
    assert bare.usage is not None
    assert bare.usage.prompt_tokens <= tokenized["count"]
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(prompt=["hello", 1], **asked)
    assert caught.value.param == "prompt"


def test_an_answer_guided_by_a_negative_prompt(client: openai.OpenAI) -> None:
    def guided(**extra: Any) -> str:
        text: str = ask(client, extra_body=extra).choices[0].message.content
        return text

    found = guided(guidance_scale=3, negative_prompt="the sea")
    assert found not in (guided(), guided(guidance_scale=3))
    assert guided(guidance_scale=1, negative_prompt="the sea") == guided()
    for wrong in ({"guidance_scale": "strong"}, {"guidance_scale": 1e9}, {"negative_prompt": 3}):
        with pytest.raises(openai.BadRequestError) as refused:
            guided(**wrong)
        assert refused.value.param in wrong


def test_choices_have_seeds_of_their_own(client: openai.OpenAI) -> None:
    asked: Any = {"temperature": 1.5, "max_tokens": 8}
    several = ask(client, n=3, seed=2**63 - 2, **asked)
    alone = [ask(client, seed=seed, **asked).choices[0].message.content for seed in (2**63 - 2, 2**63 - 1, -(2**63))]
    assert [choice.message.content for choice in several.choices] == alone
    assert len(set(alone)) == 3
    assert several.usage.completion_tokens == 3 * 8
    assert several.usage.prompt_tokens == ask(client, **asked).usage.prompt_tokens


def test_biases_and_penalties_reach_the_model(client: openai.OpenAI) -> None:
    plain = ask(client).choices[0].message.content
    assert ask(client, frequency_penalty=2.0, presence_penalty=2.0).choices[0].message.content != plain
    [token] = client.post("/../tokenize", body={"prompt": "x"}, cast_to=object)["tokens"]  # type: ignore[index]
    assert ask(client, logit_bias={str(token): 100}).choices[0].message.content == "x" * 12


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_has_the_format_that_was_asked_for(client: openai.OpenAI, stream: bool) -> None:
    answer = ask(client, response_format=FORMAT, max_tokens=40, stream=stream)
    text = "".join(c.choices[0].delta.content or "" for c in answer) if stream else answer.choices[0].message.content
    assert json.loads(text)["city"] in ("Rome", "Oslo")


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_that_must_be_called_is_called(client: openai.OpenAI, choice: Any, stream: bool) -> None:
    answer = ask(client, tools=[WEATHER], tool_choice=choice, max_tokens=60, stream=stream)
    if stream:
        deltas = [chunk.choices[0].delta for chunk in answer]
        calls = [call for delta in deltas for call in delta.tool_calls or ()]
        assert {call.index for call in calls} == {0}
        name, arguments = calls[0].function.name, "".join(call.function.arguments for call in calls)
    else:
        [call] = answer.choices[0].message.tool_calls
        assert call.id.startswith("call_")
        assert answer.choices[0].finish_reason == ("tool_calls" if choice == "required" else "stop")
        name, arguments = call.function.name, call.function.arguments
    assert name == "weather"
    assert json.loads(arguments)["city"] in ("Rome", "Oslo")


@pytest.mark.parametrize("others", [[], [{"type": "function", "function": {"name": "b", "parameters": {"const": {}}}}]])
def test_parameters_may_refer_to_their_definitions(client: openai.OpenAI, others: list[Any]) -> None:
    """As clients make them of nested types. Of several tools, random weights choose one."""
    city = {"type": "object", "properties": {"name": {"enum": ["Rome"]}}, "required": ["name"]}
    parameters = {
        "type": "object",
        "properties": {"city": {"$ref": "#/$defs/City"}},
        "required": ["city"],
        "additionalProperties": False,
        "$defs": {"City": {**city, "additionalProperties": False}},
    }
    place = {"type": "function", "function": {"name": "a", "parameters": parameters}}
    answer = ask(client, tools=[place, *others], tool_choice="required", max_tokens=100)
    [call] = answer.choices[0].message.tool_calls
    expected = {"a": {"city": {"name": "Rome"}}, "b": {}}
    assert json.loads(call.function.arguments) == expected[call.function.name]


SPOKEN: Any = {"voice": "alloy", "format": "wav"}


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "f"}}])
@pytest.mark.parametrize("kind", ["integer", ["object", "null"], {}])
def test_a_tool_that_must_be_called_takes_an_object(client: openai.OpenAI, choice: Any, kind: Any) -> None:
    """Its call would be none, because arguments are an object."""
    tool: Any = {"type": "function", "function": {"name": "f", "parameters": {"type": kind}}}
    with pytest.raises(
        openai.BadRequestError, match=r"tools: the parameters of 'f' have the type .*; accepted: 'object'"
    ) as refused:
        ask(client, tools=[tool], tool_choice=choice)
    assert refused.value.param == "tools"
    tool["function"]["parameters"] = {"type": ["object"]}
    assert ask(client, tools=[tool], tool_choice=choice, max_tokens=2).choices


def test_a_tool_that_must_be_called_hides_no_modality_that_is_not_there(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="emits 'audio'") as refused:
        ask(client, tools=[WEATHER], tool_choice="required", modalities=["text", "audio"], audio=SPOKEN)
    assert refused.value.param == "modalities"


@pytest.mark.parametrize(("size", "choice", "param"), [(35_000, "auto", "tools"), (20_000, "required", "tool_choice")])
def test_tools_that_do_not_fit_into_a_message_are_refused_by_name(
    client: openai.OpenAI, size: int, choice: Any, param: str
) -> None:
    """A choice brings the schemas of the tools a second time."""
    functions = [{"name": name, "parameters": {"type": "object", "description": "x" * size}} for name in ("f", "g")]
    with pytest.raises(openai.BadRequestError, match=f"{param}: the parameters of stage 'mind' take ") as refused:
        ask(client, tools=[{"type": "function", "function": each} for each in functions], tool_choice=choice)
    assert refused.value.param == param


@pytest.mark.parametrize("number", [2**64, -(2**63) - 1, 10**100])
def test_a_call_with_an_integer_of_any_size_may_be_sent_back(client: openai.OpenAI, number: int) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": f'{{"n": {number}}}'}}
    messages = [*HELLO, {"role": "assistant", "content": None, "tool_calls": [call]}, *HELLO]
    assert ask(client, messages=messages, tools=[WEATHER], max_tokens=2).choices


def test_calls_and_their_results_may_be_sent_back(client: openai.OpenAI) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    messages = [
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "30 °C"},
    ]
    assert ask(client, messages=messages, tools=[WEATHER]).usage.prompt_tokens > ask(client).usage.prompt_tokens
    for arguments in ("[]", '{"a": ' + "[" * 5000, '{"a": [' + "9e-324," * 5000):
        call["function"] = {"name": "weather", "arguments": arguments}
        with pytest.raises(openai.BadRequestError) as caught:
            ask(client, messages=messages, tools=[WEATHER])
        assert caught.value.param == "messages[1].tool_calls[0].function.arguments"


@pytest.mark.slow  # it needs a server of its own
def test_choices_with_log_probabilities_go_on_after_a_sigkill(start: Start, writer_config: str) -> None:
    """Nothing is missing, and nothing comes twice."""
    asked: Any = {"n": 2, "seed": 9, "temperature": 1.0, "max_tokens": 150, "logprobs": True, "frequency_penalty": 0.3}
    tokens: list[list[str]] = [[], []]
    texts, killed = ["", ""], False
    with start(config=writer_config) as server, server.openai() as client:
        expected = [
            (choice.message.content, [entry.token for entry in choice.logprobs.content])
            for choice in ask(client, **asked).choices
        ]
        for chunk in ask(client, stream=True, **asked):
            [choice] = chunk.choices
            texts[choice.index] += choice.delta.content or ""
            tokens[choice.index] += [entry.token for entry in choice.logprobs.content] if choice.logprobs else []
            if not killed and min(map(len, tokens)) > 3:
                killed = True
                os.kill(server.pid_of("mind"), signal.SIGKILL)
    assert killed
    assert list(zip(texts, tokens, strict=True)) == expected
    assert [len(each) for each in tokens] == [150, 150]


def test_embeddings(client: openai.OpenAI) -> None:
    texts = ["the sea", "the fox and the sea", "x"]
    found = client.embeddings.create(model="writer", input=texts)
    vectors = [np.array(each.embedding) for each in found.data]
    assert [each.index for each in found.data] == [0, 1, 2]
    assert all(vector.shape == (32,) and abs(np.linalg.norm(vector) - 1) < 1e-5 for vector in vectors)
    assert found.usage.total_tokens == found.usage.prompt_tokens > 3
    alone = client.embeddings.create(model="writer", input=texts[1], encoding_format="float").data[0].embedding
    np.testing.assert_allclose(alone, vectors[1], atol=1e-5)
    tokens = client.post("/../tokenize", body={"prompt": texts[1]}, cast_to=object)["tokens"]  # type: ignore[index]
    by_tokens = client.embeddings.create(model="writer", input=tokens, encoding_format="base64").data[0].embedding
    np.testing.assert_allclose(np.frombuffer(base64.b64decode(str(by_tokens)), np.float32), vectors[1], atol=1e-5)


def test_tokens_and_back(writer: Server) -> None:
    found = writer.http.post("/tokenize", json={"prompt": "the sea", "return_token_strs": True}).json()
    assert found["count"] == len(found["tokens"]) == len(found["token_strs"])
    assert found["max_model_len"] == 512
    assert writer.http.post("/detokenize", json={"tokens": found["tokens"]}).json() == {"prompt": "the sea"}
    of_messages = writer.http.post("/tokenize", json={"model": "writer", "messages": HELLO, "tools": [WEATHER]}).json()
    assert of_messages["token_strs"] is None
    text = writer.http.post("/detokenize", json={"tokens": of_messages["tokens"]}).json()["prompt"]
    assert "weather" in text
    assert text.endswith("<|im_start|>assistant\n")


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": HELLO}, 400, "prompt"),
        ("/tokenize", {"messages": [{"role": "nobody", "content": ""}]}, 400, "messages[0].role"),
        ("/tokenize", {"prompt": "a", "model": "other"}, 404, "model"),
        ("/tokenize", {"prompt": "a", "colour": "red"}, 400, "colour"),
        ("/tokenize", {"prompt": "a" * 100_000}, 400, "arguments"),
        ("/detokenize", {"tokens": [10**6]}, 400, "tokens"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens[0]"),
        ("/detokenize", {"tokens": [2**64]}, 400, "tokens[0]"),
        ("/tokenize", {"messages": [{"role": "user", "content": "x"}], "tools": [HUGE]}, 400, "arguments"),
        ("/v1/embeddings", {"model": "writer", "input": []}, 400, "input"),
        ("/v1/embeddings", {"model": "writer", "input": ["a", 1]}, 400, "input"),
        ("/v1/embeddings", {"model": "writer", "input": [[]]}, 400, "input"),
        ("/v1/embeddings", {"model": "writer", "input": [10**6]}, 400, "input"),
        ("/v1/embeddings", {"model": "writer", "input": "a" * 5000}, 400, "input"),
        ("/v1/embeddings", {"model": "writer", "input": "a", "dimensions": 8}, 400, "dimensions"),
    ],
)
def test_wrong_bodies(writer: Server, path: str, body: dict[str, Any], status: int, param: str) -> None:
    answer = writer.http.post(path, json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param), answer.text


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"prompt": "a"}),
        ("/detokenize", {"tokens": [1]}),
        ("/v1/embeddings", {"model": "studio", "input": "a"}),
    ],
)
def test_an_engine_that_cannot_is_named(studio: Server, path: str, body: dict[str, Any]) -> None:
    answer = studio.http.post(path, json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["stage"]) == (501, "unsupported", "mind")
    assert error["capability"] in ("tokenize", "detokenize", "encode")
    assert error["why"]
    assert answer.headers["x-should-retry"] == "false"
