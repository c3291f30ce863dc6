"""What the error of a bad event says: the wrong field, and what is accepted there."""

from __future__ import annotations

from typing import Any

import pytest

from omni_actors.serve.http.errors import HTTPError
from omni_actors.serve.realtime.config import ResponseParams, SessionConfig, convert, updated
from omni_actors.serve.realtime.events import read_event
from omni_actors.serve.realtime.tools import MAX_TOOLS_BYTES, require_tools

CONFIG = SessionConfig(type="realtime", model="studio", output_modalities=["text"])
PARTS = "'input_text', 'input_audio', 'output_text', 'output_audio'"


def of_input(**fields: Any) -> dict[str, Any]:
    return {"audio": {"input": fields}}


@pytest.mark.parametrize(
    ("update", "param", "reason"),
    [
        ({"include": ["logprobs"]}, "include", "not supported; accepted: [], null"),
        ({"prompt": {"id": "x"}}, "prompt", "not supported; accepted: null"),
        ({"reasoning": {"effort": "low"}}, "reasoning", "not supported; accepted: null"),
        (
            of_input(noise_reduction={"type": "near_field"}),
            "audio.input.noise_reduction",
            "not supported; accepted: null",
        ),
        (
            {"truncation": {"type": "retention_ratio", "retention_ratio": 0.8}},
            "truncation",
            "expected text, got a mapping; accepted: 'auto', 'disabled'",
        ),
        (
            of_input(turn_detection={"type": "none"}),
            "audio.input.turn_detection.type",
            "Invalid value 'none'; accepted: 'server_vad', 'semantic_vad'",
        ),
        (
            of_input(transcription={"language": "German?"}),
            "audio.input.transcription.language",
            "expected a code such as 'en' or 'pt-BR' or null",
        ),
        ({"tools": [{"type": "mcp"}]}, "tools[0].type", "Invalid value 'mcp'; accepted: 'function'"),
        (
            {"tools": [{"type": "function", "name": "a b"}]},
            "tools[0].name",
            "expected 1 to 64 letters, digits, '_', '.' or '-'",
        ),
        (
            {"output_modalities": ["text", "audio"]},
            "output_modalities",
            "expected a list of length <= 1; accepted: ['text'] or ['audio']",
        ),
        ({"max_output_tokens": "all"}, "max_output_tokens", "Invalid value 'all'; accepted: an integer, 'inf'"),
        ({"max_output_tokens": 1_000_001}, "max_output_tokens", "expected an integer <= 1000000; accepted: an integer"),
        ({"type": "x" * 1000}, "type", f"Invalid value '{'x' * 130}"),
        ({"type": "x" * 1000}, "type", "; accepted: 'realtime'"),
    ],
)
def test_an_update_that_is_refused(update: dict[str, Any], param: str, reason: str) -> None:
    with pytest.raises(HTTPError) as caught:
        updated(CONFIG, update)
    error = caught.value
    assert (error.param, error.code) == (f"session.{param}", "invalid_value")
    assert error.message.startswith(f"session.{param}: ")
    assert reason in error.message


def tool(name: str, *, size: int = 0, type: str = "object") -> dict[str, Any]:
    parameters = {"type": type, "description": "x" * size}
    return {"type": "function", "name": name, "parameters": parameters}


def choice(name: str) -> dict[str, Any]:
    return {"type": "function", "name": name}


MANY = [tool(f"f{number}", size=1000) for number in range(128)]
HALF = [tool("f", size=MAX_TOOLS_BYTES // 2)]
BEYOND = {"type": "function", "name": "f", "parameters": {"minimum": -(2**63) - 1}}
DEMANDED = "the tools and the schema of the call that this choice demands take "


@pytest.mark.parametrize(
    ("before", "update", "param", "reason"),
    [
        ({}, {"tools": [tool("f", size=8_000_000)]}, "tools", "the tools take 80000"),
        ({}, {"tools": MANY}, "tools", "the tools take 1"),
        ({}, {"tools": MANY, "tool_choice": "none"}, "tools", "the tools take 1"),
        ({}, {"tools": [BEYOND], "tool_choice": "required"}, "tools", "the tools cannot be encoded: can't"),
        ({}, {"tools": HALF, "tool_choice": "required"}, "tool_choice", DEMANDED),
        ({"tools": HALF}, {"tool_choice": choice("f")}, "tool_choice", DEMANDED),
        ({"tools": [tool("f")], "tool_choice": "required"}, {"tools": HALF}, "tools", DEMANDED),
        ({}, {"tool_choice": choice("f")}, "tool_choice.name", "'f' is not one of the tools"),
        ({"tools": [tool("f")]}, {"tool_choice": choice("g")}, "tool_choice.name", "'g' is not one of the tools"),
        ({}, {"tool_choice": "required"}, "tool_choice", "there are no tools to choose from"),
        (
            {"tools": [tool("f")], "tool_choice": choice("f")},
            {"tools": [tool("g")]},
            "tools",
            "the session's tool_choice is the function 'f', which is not one of these tools; change tool_choice too",
        ),
        (
            {"tools": [tool("f")], "tool_choice": "required"},
            {"tools": []},
            "tools",
            "the session's tool_choice is 'required', and there would be no tool; change tool_choice too",
        ),
        ({}, {"tools": [tool("f", type="null")], "tool_choice": "required"}, "tools", "the parameters of 'f' have"),
    ],
)
def test_tools_and_a_choice_that_no_response_can_use(
    before: dict[str, Any], update: dict[str, Any], param: str, reason: str
) -> None:
    config = updated(CONFIG, before)
    require_tools(config, "session.", is_chosen="tool_choice" in before)
    with pytest.raises(HTTPError) as caught:
        require_tools(updated(config, update), "session.", is_chosen="tool_choice" in update)
    assert caught.value.param == f"session.{param}"
    assert caught.value.message.startswith(f"session.{param}: {reason}")


def test_a_response_without_tools_ignores_the_choice_of_its_session() -> None:
    config = updated(CONFIG, {"tools": [tool("f")], "tool_choice": "required"})
    require_tools(convert({"tools": []}, ResponseParams, "response").applied_to(config), "response.", is_chosen=False)


@pytest.mark.parametrize(
    ("event", "param", "reason"),
    [
        ({"type": "response.creat"}, "type", "Invalid value 'response.creat'; accepted: 'session.update', "),
        (
            {"type": "conversation.item.truncate", "item_id": "x", "content_index": 1, "audio_end_ms": 0},
            "content_index",
            "not supported; accepted: 0",
        ),
        (
            {
                "type": "conversation.item.create",
                "item": {"type": "message", "role": "user", "content": [{"type": "input_image", "image_url": "data:"}]},
            },
            "item.content[0].type",
            f"Invalid value 'input_image'; accepted: {PARTS}; pictures are not accepted",
        ),
    ],
)
def test_an_event_that_is_refused(event: dict[str, Any], param: str, reason: str) -> None:
    with pytest.raises(HTTPError) as caught:
        read_event(event)
    assert (caught.value.param, caught.value.code) == (param, "invalid_value")
    assert caught.value.message.startswith(f"{param}: {reason}")


def test_an_unknown_field_is_named_with_the_fields_that_its_object_has() -> None:
    with pytest.raises(HTTPError) as caught:
        updated(CONFIG, {"voice": "x"})
    assert (caught.value.param, caught.value.code) == ("session.voice", "unknown_parameter")
    assert caught.value.message.startswith("session.voice: unknown field; accepted: 'audio', 'include', ")
    with pytest.raises(HTTPError, match=r"eagerness: unknown field; .*'silence_duration_ms', 'threshold', 'type'$"):
        updated(CONFIG, of_input(turn_detection={"type": "server_vad", "eagerness": "low"}))
    with pytest.raises(HTTPError) as caught:
        read_event({"type": "response.cancel", "reason": 1})
    assert caught.value.message == "reason: unknown field; accepted: 'event_id', 'response_id', 'type'"


@pytest.mark.parametrize("path", ["all[7]", "all[²]", f"all[{'9' * 5000}]", "[", "type[1].x"])
def test_an_unknown_field_may_look_like_the_path_of_an_error(path: str) -> None:
    with pytest.raises(HTTPError) as caught:
        read_event({"type": "response.cancel", f"x` - at `$.{path}": 1, "all": [1]})
    assert caught.value.code == "unknown_parameter"
