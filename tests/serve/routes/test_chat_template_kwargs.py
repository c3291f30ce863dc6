"""``chat_template_kwargs``, as clients of Qwen's models send them, with OpenAI's own client."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from omni_actors.config import load
from omni_actors.serve.api.schemas import takes_parameter
from tests.support.http_server import Server, Start

HELLO: Any = [{"role": "user", "content": "hello"}]
NO_THOUGHTS = {"chat_template_kwargs": {"enable_thinking": False}}
DEFAULTS = ("-s", "stages.mind.defaults.chat_template_kwargs.enable_thinking=false")


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> str:
    from tests.stages.llm.test_chat_template_kwargs import thinking_model  # loads torch, as for ``writer_config``

    model = thinking_model(tmp_path_factory.mktemp("thinking"))
    return f"""\
name: thinking
stages:
  mind: {{engine: llm, model: "{model}", accepts: [messages], emits: text, threads: 1, options: {{context: 512}}}}
"""


@pytest.fixture(scope="module")
def thinking(start: Start, config: str) -> Iterator[Server]:
    with start(config=config) as server:
        yield server


@pytest.fixture
def client(thinking: Server) -> Iterator[openai.OpenAI]:
    with thinking.openai() as client:
        yield client


def chat(client: openai.OpenAI, more: Any = None, **arguments: Any) -> Any:
    arguments = {"max_tokens": 24, "temperature": 1.0, "seed": 3, **arguments}
    return client.chat.completions.create(model="thinking", messages=HELLO, extra_body=more, **arguments)


def text_of(server: Server, more: dict[str, Any]) -> str:
    tokens = server.http.post("/tokenize", json={"messages": HELLO, **more}).json()["tokens"]
    return str(server.http.post("/detokenize", json={"tokens": tokens}).json()["prompt"])


def test_the_template_gets_them_in_chats_and_in_tokenize(client: openai.OpenAI, thinking: Server) -> None:
    plain, asked = chat(client), chat(client, NO_THOUGHTS)
    assert text_of(thinking, NO_THOUGHTS) == text_of(thinking, {}) + "<think></think>"
    counts = [thinking.http.post("/tokenize", json={"messages": HELLO, **each}).json() for each in ({}, NO_THOUGHTS)]
    assert [each["count"] for each in counts] == [plain.usage.prompt_tokens, asked.usage.prompt_tokens]
    assert plain.choices[0].message.content != asked.choices[0].message.content
    for same in ({"chat_template_kwargs": {}}, {"chat_template_kwargs": None}, {"chat_template_kwargs": {"other": 1}}):
        assert text_of(thinking, same) == text_of(thinking, {})
        assert chat(client, same).choices == plain.choices


def test_the_template_gets_them_in_responses(client: openai.OpenAI) -> None:
    asked: Any = {"model": "thinking", "input": "hello", "max_output_tokens": 4}
    plain = client.responses.create(**asked)
    found = client.responses.create(**asked, extra_body=NO_THOUGHTS)
    assert plain.usage is not None
    assert found.usage is not None
    assert found.usage.input_tokens > plain.usage.input_tokens


@pytest.mark.slow  # it needs a server of its own
def test_an_answer_goes_on_after_a_sigkill(start: Start, config: str) -> None:
    """The prompt is rendered again, with the same variables."""
    asked: Any = {"max_tokens": 200, "logprobs": True}
    text, tokens, usage = "", 0, None
    with start(config=config) as server, server.openai() as client:
        expected = chat(client, NO_THOUGHTS, **asked)
        pid = server.pid_of("mind")
        for chunk in chat(client, NO_THOUGHTS, stream=True, stream_options={"include_usage": True}, **asked):
            usage = chunk.usage or usage
            for choice in chunk.choices:
                text += choice.delta.content or ""
                tokens += len(choice.logprobs.content) if choice.logprobs else 0
            if pid and tokens > 3:
                os.kill(pid, signal.SIGKILL)
                pid = 0
    assert not pid
    assert text == expected.choices[0].message.content
    assert usage == expected.usage


@pytest.mark.parametrize(
    "kwargs",
    [
        *(
            {"tools": []},
            {"messages": []},
            {"chat_template": "x"},
            {"add_generation_prompt": False},
            {"bos_token": "x"},
        ),
        *({"tokenize": False}, {"return_dict": True}, {"raise_exception": 1}, {"x": {"y": 1}}, {"x": 10**9}),
        *({"x": "a" * 2000}, {f"x{n}": 1 for n in range(17)}, "x", {"mode": "none"}, {"budget": "x"}),
        {"x": ["<|im_start|>"]},
    ],
)
def test_what_is_refused(client: openai.OpenAI, thinking: Server, kwargs: Any) -> None:
    """Also what the template raises for. The worker goes on."""
    pid = thinking.pid_of("mind")
    with pytest.raises(openai.BadRequestError) as caught:
        chat(client, {"chat_template_kwargs": kwargs})
    assert caught.value.param == "chat_template_kwargs"
    answer = thinking.http.post("/tokenize", json={"messages": HELLO, "chat_template_kwargs": kwargs})
    assert (answer.status_code, answer.json()["error"]["param"].removesuffix("[...]")) == (400, "chat_template_kwargs")
    assert thinking.pid_of("mind") == pid


def test_which_pipelines_take_them() -> None:
    """Others refuse them by name, as any parameter that they do not take."""
    assert not takes_parameter(load("qwen_image"), "chat_template_kwargs")
    for name in ("voice", "qwen3_omni", "qwen2_5_omni", "voice_vllm", "qwen3_omni_vllm", "qwen2_5_omni_vllm"):
        assert takes_parameter(load(name), "chat_template_kwargs"), name


def test_a_pipeline_has_defaults(start: Start, config: str) -> None:
    """A request's mapping takes the place of the whole default."""
    with start(*DEFAULTS, config=config) as server, server.openai() as client:
        counts = [chat(client, each).usage.prompt_tokens for each in (None, NO_THOUGHTS, {"chat_template_kwargs": {}})]
        assert counts[0] == counts[1] > counts[2]
        assert text_of(server, {}) == text_of(server, NO_THOUGHTS)
        assert text_of(server, {"chat_template_kwargs": {}}) == text_of(server, {}).removesuffix("<think></think>")
