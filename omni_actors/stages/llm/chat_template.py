"""A tokenizer's chat template, and tools in the prompts of a template that has none.

Rules
1. A template that names ``tools`` gets the tools, and the calls and results of the messages, as transformers defines.
2. For any other template they become text of ordinary messages (``tools_as_text``). The text has the form that models
   of the Hermes and Qwen families are trained on, and in which the server finds calls in an answer.
3. A conversation without tools is rendered as it is.
4. transformers renders templates, in a sandbox (``applied``). Here they are parsed only.
5. A template's failure is its request's, whatever it raises.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import jinja2
import jinja2.meta
from jinja2.ext import Extension
from jinja2.nodes import Node
from jinja2.parser import Parser

from omni_actors.stages.base import InvalidRequest
from omni_actors.stages.refusal import request_work

RenderedMessage: TypeAlias = dict[str, Any]
"""A message as chat templates take it. The arguments of its calls are JSON objects."""

_TOOLS = """You can call these functions:
<tools>
{functions}
</tools>
To call a function, write its name and its arguments as JSON, in this form:
<tool_call>
{{"name": "the name", "arguments": {{"an argument": "its value"}}}}
</tool_call>
You get its result as <tool_response>the result</tool_response>."""


class _Generation(Extension):
    """The block ``{% generation %}``, by which templates mark an assistant's tokens for training."""

    tags = {"generation"}  # noqa: RUF012  # jinja2 declares it like this

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def check_chat_template(tokenizer: Any, source: object) -> None:
    """Raise ValueError if a tokenizer has no chat template, or one that is not Jinja. source: where it is from."""
    if not tokenizer.chat_template:
        raise ValueError(f"{source}: there is no chat template; this engine serves conversations only")
    found = tokenizer.chat_template
    try:
        for template in found.values() if isinstance(found, dict) else (found,):
            knows_tools(template)
    except jinja2.TemplateSyntaxError as error:
        raise ValueError(f"{source}: line {error.lineno} of the chat template is not Jinja: {error.message}") from error


@functools.lru_cache(maxsize=4)
def knows_tools(template: str) -> bool:
    """Return whether a chat template renders tools. Raises jinja2.TemplateSyntaxError."""
    parsed = jinja2.Environment(extensions=["jinja2.ext.loopcontrols", _Generation]).parse(template)
    return "tools" in jinja2.meta.find_undeclared_variables(parsed)


def applied(tokenizer: Any, messages: Sequence[RenderedMessage], kwargs: Mapping[str, Any], **more: Any) -> Any:
    """Return a conversation as the chat template renders it, up to where the model's answer begins.

    kwargs: the request's ``chat_template_kwargs``. more: other arguments of transformers' ``apply_chat_template``,
    which decide whether the result is text or tokens.
    Raises InvalidRequest: the template refuses the conversation, or cannot render it.
    """
    param = "chat_template_kwargs" if kwargs else "messages"
    with request_work(param):
        try:
            return tokenizer.apply_chat_template(messages, add_generation_prompt=True, **more, **kwargs)
        except jinja2.TemplateError as error:
            # Some templates refuse conversations such as two user messages in a row.
            what = "the conversation with these chat_template_kwargs" if kwargs else "the conversation"
            raise InvalidRequest(f"the model's chat template refuses {what}: {error}", param=param) from error


def tools_as_text(messages: Sequence[RenderedMessage], tools: Sequence[Mapping[str, Any]]) -> list[RenderedMessage]:
    """Return a conversation with its tools as text, for a template that does not know them.

    The system message at the beginning says which tools there are and how they are called; without one there, one is
    added. Calls are text of the assistant. Results are messages of the user, because most templates have no other role
    for them. Results that follow each other are one message, because some templates refuse two messages of one role.
    """
    made: list[RenderedMessage] = []
    if tools:
        functions = "\n".join(_json(tool.get("function", tool)) for tool in tools)
        made.append({"role": "system", "content": _TOOLS.format(functions=functions)})
        if messages and messages[0]["role"] == "system":
            made[0]["content"] = _joined(messages[0]["content"], made[0]["content"], "\n\n")
            messages = messages[1:]
    follows_result = False
    for message in messages:
        is_result = message["role"] == "tool"
        if is_result:
            result = f"<tool_response>\n{message['content']}\n</tool_response>"
            if follows_result:
                made[-1]["content"] += f"\n{result}"
            else:
                made.append({"role": "user", "content": result})
        else:
            content = message["content"]
            for call in message.get("tool_calls", ()):
                content = _joined(content, f"<tool_call>\n{_json(call['function'])}\n</tool_call>")
            rest = {name: value for name, value in message.items() if name != "tool_calls"}
            made.append({**rest, "content": content})
        follows_result = is_result
    return made


def _joined(before: str, after: str, separator: str = "\n") -> str:
    return f"{before}{separator}{after}" if before else after


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
