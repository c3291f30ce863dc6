"""Tools in prompts: rendered by a chat template that knows them, refused by one that does not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from omni_actors.stages.base import CLIENT, Chunk, InvalidRequest, StageRequest
from omni_actors.stages.llm.engine import LLMEngine
from tests.stages.llm.tiny_engine import Results, opened, transformers_of
from tiny_models.llama import save_model

TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}
MESSAGES: list[dict[str, Any]] = [
    {"role": "user", "content": "Is it warm in Rome?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "30 °C", "tool_call_id": "call_1"},
]
TEMPLATE = """{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}{% endfor %}<|im_end|>
{% endif %}{% for m in messages %}<|im_start|>{{ m['role'] }}
{{ m['content'] }}{% for call in m['tool_calls'] %}<tool_call>{{ call['function'] | tojson }}</tool_call>{% endfor %}
{{- m['tool_call_id'] }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def with_tools(path: Path) -> Path:
    save_model(path, max_position_embeddings=512)
    file = path / "chat_template.jinja"
    assert file.exists()
    file.write_text(TEMPLATE)
    return path


@pytest.fixture(scope="module")
def knowing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_tools(tmp_path_factory.mktemp("tools"))


@pytest.fixture(scope="module")
def tool_engine(knowing: Path) -> Iterator[LLMEngine]:
    with closing(opened(knowing, context=512)) as engine:
        yield engine


def ask(engine: LLMEngine, messages: list[dict[str, Any]], **params: Any) -> Any:
    engine.start(StageRequest(0, (CLIENT,), {"max_tokens": 3, **params}))
    engine.feed(0, Chunk(source=CLIENT, seq=0, last=True, tensors={}, data={"messages": messages}))
    return Results().run(engine).ends[0]


@pytest.mark.parametrize("tools", [TOOLS, []])
@pytest.mark.parametrize("count", [1, 3])
def test_a_prompt_is_what_transformers_renders(
    tool_engine: LLMEngine, knowing: Path, tools: list[Any], count: int
) -> None:
    tokenizer, _ = transformers_of(knowing)
    expected = tokenizer.apply_chat_template(
        MESSAGES[:count], tools=tools or None, add_generation_prompt=True, return_dict=False
    )
    tokenized = tool_engine.call("tokenize", {"messages": MESSAGES[:count], "tools": tools})
    assert tokenized["tokens"] == expected
    assert ask(tool_engine, MESSAGES[:count], tools=tools)["prompt_tokens"] == len(expected)


def test_a_call_that_the_model_must_make_has_the_schema_of_its_tool(tool_engine: LLMEngine) -> None:
    schema = {"type": "object", "properties": {"warm": {"type": "boolean"}}, "required": ["warm"]}
    settings = {"json": {**schema, "additionalProperties": False}}
    tool_engine.start(StageRequest(0, (CLIENT,), {"tools": TOOLS, "structured_outputs": settings}))
    tool_engine.feed(0, Chunk(source=CLIENT, seq=0, last=True, tensors={}, data={"messages": MESSAGES}))
    assert json.loads(Results().run(tool_engine).text(0)).keys() == {"warm"}


@pytest.mark.parametrize(("messages", "params"), [(MESSAGES[:1], {"tools": TOOLS}), (MESSAGES, {})])
def test_a_template_that_does_not_know_tools_refuses_them(
    engine: LLMEngine, messages: list[dict[str, Any]], params: dict[str, Any]
) -> None:
    with pytest.raises(InvalidRequest, match="does not know tools") as caught:
        ask(engine, messages, **params)
    assert caught.value.param == "tools"
