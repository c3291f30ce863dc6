"""Calls of tools in a model's text, in pieces of any size."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_actors.serve.api.json_body import MAX_DEPTH
from omni_actors.serve.api.tools import (
    MAX_CALL_BYTES,
    FunctionDefinition,
    Tool,
    ToolCall,
    ToolCallFilter,
    call_schema,
    checked_arguments,
    written_call,
)
from omni_actors.serve.http.errors import HTTPError

WEATHER = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
TIME = '<tool_call>{"name": "time"}</tool_call>'
CITY = ("weather", {"city": "Rome"})
TEXTS: list[tuple[str, str, list[Any]]] = [
    # the model's text, the answer's text, the calls
    ("hello", "hello", []),
    ("a < b, <tool_ca", "a < b, <tool_ca", []),
    (WEATHER, "", [CITY]),
    (f"I look.\n{WEATHER}\n{TIME}", "I look.", [CITY, ("time", {})]),
    (f"{TIME} it is done", "it is done", [("time", {})]),
    (f"{TIME}\n<tool_call>no call</tool_call> done", "<tool_call>no call</tool_call> done", [("time", {})]),
    ("write \n<tool_call>no call</tool_call> so", "write \n<tool_call>no call</tool_call> so", []),
    ("the <tool_call> tag", "the <tool_call> tag", []),
    (WEATHER.removesuffix("</tool_call>"), "", [CITY]),
    ("<tool_call>no call</tool_call>!", "<tool_call>no call</tool_call>!", []),
    ("<tool_call>no call", "<tool_call>no call", []),
    ('<tool_call>{"name": 7}</tool_call>', '<tool_call>{"name": 7}</tool_call>', []),
    ('<tool_call>{"name": "x", "arguments": []}', '<tool_call>{"name": "x", "arguments": []}', []),
]


@pytest.mark.parametrize(("text", "expected", "calls"), TEXTS)
@given(sizes=st.lists(st.integers(1, 9), min_size=1))
def test_calls_are_found_however_the_text_is_cut(text: str, expected: str, calls: list[Any], sizes: list[int]) -> None:
    calls_filter, found, texts = ToolCallFilter(), [], []
    at = turn = 0
    while at < len(text):
        size = sizes[turn % len(sizes)]
        piece, more = calls_filter.push(text[at : at + size])
        texts.append(piece)
        found += more
        at, turn = at + size, turn + 1
    piece, more = calls_filter.finish()
    assert "".join([*texts, piece]) == expected
    assert [(call.function.name, json.loads(call.function.arguments)) for call in [*found, *more]] == calls


def test_calls_beyond_the_first_are_dropped_where_one_is_allowed() -> None:
    calls_filter = ToolCallFilter(most=1)
    text, calls = calls_filter.push(f"I look.\n{WEATHER}\n{TIME}\n<tool_call>" + '{"name": "last"}')
    assert (text, [call.function.name for call in calls]) == ("I look.", ["weather"])
    assert calls_filter.finish() == ("", [])


@pytest.mark.parametrize(
    "arguments",
    [
        '{"n": 18446744073709551616, "m": -9223372036854775809}',
        '{"x": 0.1000000000000000055511151231257827, "z": 1.0}',
        '{ "a" :\t1,\n"a": 2 }',
        '{"a": "\\u00e9\\/"}',
    ],
)
async def test_arguments_are_what_the_model_wrote(arguments: str) -> None:
    """Decoded and encoded again, other numbers and other text would come out, or none."""
    text = f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>'
    left, [call] = ToolCallFilter().push(text)
    assert (left, call.function.arguments) == ("", arguments)
    assert await checked_arguments(call, "arguments") == arguments, "the client sends it back with its next message"


@pytest.mark.parametrize("number", ["9" * 5000, "1E400"])
def test_arguments_that_the_server_would_not_take_back_stay_text(number: str) -> None:
    text = f'<tool_call>{{"name": "f", "arguments": {{"n": {number}}}}}</tool_call>'
    assert ToolCallFilter().push(text) == (text, [])


def test_only_references_to_the_schema_itself_move_with_it() -> None:
    values: Any = {
        "const": {"$ref": "#"},
        "enum": [{"$ref": "#/a"}],
        "default": {"$ref": "#"},
        "examples": [{"$ref": "#"}],
    }
    parameters = {
        "properties": {"default": {"$ref": "#"}, "values": values, "anchor": {"$ref": "#name"}},
        "items": {"$ref": "#/$defs/const"},
        "$defs": {"const": {"anyOf": [{"$ref": "#/properties/default"}]}},
    }
    place = "#/$defs/arguments_0"
    assert call_schema([Tool(FunctionDefinition("f", parameters=parameters))])["$defs"]["arguments_0"] == {
        "properties": {"default": {"$ref": place}, "values": values, "anchor": {"$ref": "#name"}},
        "items": {"$ref": f"{place}/$defs/const"},
        "$defs": {"const": {"anyOf": [{"$ref": f"{place}/properties/default"}]}},
    }


def test_a_call_is_one_of_the_tools_with_its_arguments_and_nothing_else() -> None:
    def call(name: str, at: int) -> dict[str, Any]:
        return {
            "type": "object",
            "properties": {"name": {"const": name}, "arguments": {"$ref": f"#/$defs/arguments_{at}"}},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }

    tools = [Tool(FunctionDefinition("f")), Tool(FunctionDefinition("g", parameters={"type": "string"}))]
    nothing = {"type": "object"}
    assert call_schema(tools[:1]) == {**call("f", 0), "$defs": {"arguments_0": nothing}}
    definitions = {"arguments_0": nothing, "arguments_1": {"type": "string"}}
    assert call_schema(tools) == {"anyOf": [call("f", 0), call("g", 1)], "$defs": definitions}


def test_text_that_cannot_begin_a_call_is_not_pending() -> None:
    assert ToolCallFilter().push("hello <b>")[0] == "hello <b>"


DEAR = {
    "nested_too_deeply": '{"a": ' + "[" * 5000,
    "too_many_values": '{"a": [' + ",".join(["9e-324"] * 300_000) + "]}",
    "too_much_text": '{"a": "' + "x" * MAX_CALL_BYTES + '"}',
}
"""Arguments that would overflow the stack, or take seconds to decode, by the code of their refusal."""


@pytest.mark.parametrize("code", DEAR)
async def test_arguments_that_are_dear_to_decode_are_refused_by_name(code: str) -> None:
    arguments = DEAR[code] if code != "too_many_values" else DEAR[code][: MAX_CALL_BYTES - 100]
    with pytest.raises(HTTPError) as refused:
        await checked_arguments(ToolCall.of("weather", arguments), "item.arguments")
    assert (refused.value.status, refused.value.param, refused.value.code) == (400, "item.arguments", code)
    assert refused.value.message.startswith("item.arguments: ")
    written = f'{{"name": "weather", "arguments": {arguments}}}'
    assert written_call(written) is None
    assert ToolCallFilter().push(f"<tool_call>{written}</tool_call>") == (f"<tool_call>{written}</tool_call>", [])


async def test_arguments_up_to_the_bounds_are_decoded() -> None:
    levels = MAX_DEPTH - 1  # the object is one
    call = ToolCall.of("weather", '{"a": ' + "[" * levels + "]" * levels + "}")
    assert await checked_arguments(call, "item.arguments") == call.function.arguments
    fields = {"a": "é" * (MAX_CALL_BYTES // 2 - 10)}
    call = ToolCall.of("weather", json.dumps(fields, ensure_ascii=False))
    assert json.loads(await checked_arguments(call, "item.arguments")) == fields
