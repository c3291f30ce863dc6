"""The conversation of a request to /v1/responses, as the chat API has it."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from omni_actors.serve.api import response_schemas as items
from omni_actors.serve.api import schemas
from omni_actors.serve.api.tools import FunctionCall, FunctionDefinition, FunctionName, NamedTool, Tool, ToolCall

Placed = tuple[str, schemas.ChatMessage]
"""A message, and the field of the body that it is from."""


def messages_of(body: items.ResponsesRequest) -> list[Placed]:
    """Return the messages of the input. Calls that follow each other, or a text of the assistant, are one message."""
    if isinstance(body.input, str):
        return [("input", schemas.ChatMessage(role="user", content=body.input))]
    found: list[Placed] = []
    for at, item in enumerate(body.input):
        param = f"input[{at}]"
        if isinstance(item, items.Message):
            found.append((param, schemas.ChatMessage(role=item.role, content=_content(item.content))))
        elif isinstance(item, items.CallOutput):
            text = item.output if isinstance(item.output, str) else "".join(part.text for part in item.output)
            found.append((param, schemas.ChatMessage(role="tool", content=text, tool_call_id=item.call_id)))
        else:
            call = ToolCall(item.call_id, FunctionCall(item.name, item.arguments))
            if found and found[-1][1].role == "assistant":
                place, before = found.pop()
                calls = [*(before.tool_calls or ()), call]
                found.append((place, msgspec.structs.replace(before, tool_calls=calls)))
            else:
                found.append((param, schemas.ChatMessage(role="assistant", tool_calls=[call])))
    return found


def _content(
    content: str | Sequence[items.InputPart],
) -> str | list[schemas.ContentPart]:
    if isinstance(content, str):
        return content
    parts: list[schemas.ContentPart] = []
    for part in content:
        match part:
            case items.InputImage(image_url=url, detail=detail):
                parts.append(schemas.ImagePart(schemas.ImageURL(url, detail or "auto")))
            case items.InputSound(input_audio=audio):
                parts.append(schemas.AudioPart(audio))
            case items.RefusalText(refusal=text) | items.InputText(text=text) | items.OutputText(text=text):
                parts.append(schemas.TextPart(text))
    return parts


def chat_request(body: items.ResponsesRequest, messages: Sequence[schemas.ChatMessage]) -> schemas.ChatRequest:
    """Return the request to the chat API that gives the same answer."""
    choice = body.tool_choice
    return schemas.ChatRequest(
        model=body.model,
        messages=list(messages),
        modalities=list(body.modalities) if body.modalities else None,
        audio=body.audio,
        stream=body.stream,
        max_completion_tokens=body.max_output_tokens,
        seed=body.seed,
        tools=[Tool(_function(tool)) for tool in body.tools],
        tool_choice=NamedTool(FunctionName(choice.name)) if isinstance(choice, items.FunctionChoice) else choice,
        parallel_tool_calls=body.parallel_tool_calls,
        response_format=_format(body.text),
    )


def _function(tool: items.FunctionTool) -> FunctionDefinition:
    return FunctionDefinition(tool.name, tool.description or "", tool.parameters or {}, tool.strict)


def _format(text: items.TextConfig) -> schemas.TextFormat | schemas.JSONFormat | schemas.JSONSchemaFormat:
    match text.format:
        case items.SchemaFormat(name=name, schema=schema):
            return schemas.JSONSchemaFormat(schemas.JSONSchema(schema, name))
        case items.ObjectFormat():
            return schemas.JSONFormat()
        case _:
            return schemas.TextFormat()
