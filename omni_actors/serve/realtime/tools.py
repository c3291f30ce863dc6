"""The tools of a session or of a response: how the chat API has them, and which are refused.

Rule: what no response can use is refused by the event that sets it, and not by each later response.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from omni_actors.serve.api.tools import FunctionDefinition, FunctionName, NamedTool, Tool
from omni_actors.serve.http.errors import bad_request
from omni_actors.serve.realtime.config import FunctionChoice, SessionConfig
from omni_actors.serve.routes.chat import require_objects, tool_parameters
from omni_actors.system import PARAMS_BYTES

MAX_TOOLS_BYTES = PARAMS_BYTES - 4096
"""The limit of the tools and of the schema of a call that the model must make. The rest is for a stage's other
parameters."""


def chat_tools(config: SessionConfig) -> list[Tool]:
    """Return the tools as the chat API has them."""
    return [Tool(FunctionDefinition(each.name, each.description, each.parameters)) for each in config.tools]


def chat_tool_choice(config: SessionConfig) -> Literal["none", "auto", "required"] | NamedTool:
    """Return the choice of a tool as the chat API has it."""
    choice = config.tool_choice
    return NamedTool(FunctionName(choice.name)) if isinstance(choice, FunctionChoice) else choice


def require_tools(config: SessionConfig, place: str, *, is_chosen: bool) -> None:
    """Refuse tools that no response can use, and the choice of a tool that is not there. Raises HTTPError.

    Args:
        config: the configuration of a session or of a response.
        place: the client's name of it, before the names of its fields: "session." or "response.".
        is_chosen: whether the client sets ``tool_choice`` there. If not, it may set the tools.
    """
    tools, choice = chat_tools(config), config.tool_choice
    _require_fitting(tools, f"{place}tools", "the tools")
    if choice in ("none", "auto"):
        return
    named = {each.function.name: each for each in tools}
    if isinstance(choice, FunctionChoice):
        called = [named[choice.name]] if choice.name in named else []
        param, reason = f"{place}tool_choice.name", f"{choice.name!r} is not one of the tools"
        before = f"the session's tool_choice is the function {choice.name!r}, which is not one of these tools"
    else:
        called = tools
        param, reason = f"{place}tool_choice", "there are no tools to choose from"
        before = f"the session's tool_choice is {choice!r}, and there would be no tool"
    if not called and is_chosen:
        raise bad_request(f"{param}: {reason}", param)
    if not called:
        raise bad_request(f"{place}tools: {before}; change tool_choice too", f"{place}tools")
    require_objects([each.function for each in called], f"{place}tools")
    given = {name: value for name, _, value in tool_parameters(tools, chat_tool_choice(config))}
    what = "the tools and the schema of the call that this choice demands"
    _require_fitting(given, f"{place}{'tool_choice' if is_chosen else 'tools'}", what)


def _require_fitting(value: Any, param: str, what: str) -> None:
    """Raises HTTPError: MessagePack cannot have the value, such as an integer beyond 64 bits, or it is too large."""
    try:
        size = len(msgspec.msgpack.encode(value))
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise bad_request(f"{param}: {what} cannot be encoded: {error}", param) from error
    if size > MAX_TOOLS_BYTES:
        message = f"{param}: {what} take {size} bytes; the limit is {MAX_TOOLS_BYTES}"
        raise bad_request(message, param, "tools_too_large")
