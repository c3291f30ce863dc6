"""The text of a prompt, from a request's chunks.

Rules
1. A chunk of the client has messages of the conversation (see ``multimodal.conversation``), or a part of a raw prompt
   (see ``raw_prompt``), which is the whole prompt then.
2. A chunk of an upstream stage has a piece of a transcript: ``data["text"]``, of the recording ``data["index"]``.
3. Recordings without a conversation are the user's question.
4. The model gets text only: an audio part is replaced by its transcript, and newlines join the parts of a message.
5. Tools, calls of tools and their results are rendered by the chat template, or become text (see ``chat_template``).
6. Control tokens in the texts of a conversation are plain characters (see ``control_tokens``); those of a raw prompt
   count.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from omni_actors.stages.autoregressive.language import refuse_beyond_context
from omni_actors.stages.autoregressive.options import DEFAULT_TOKENIZATION, TokenizationKwargs
from omni_actors.stages.autoregressive.text import Vocabulary
from omni_actors.stages.base import CLIENT, Chunk, InvalidRequest
from omni_actors.stages.llm import control_tokens
from omni_actors.stages.llm.chat_template import RenderedMessage, applied, knows_tools, tools_as_text
from omni_actors.stages.multimodal import conversation
from omni_actors.stages.multimodal.conversation import AudioPart, MediaPart, Message, TextPart, ToolCall
from omni_actors.stages.raw_prompt import RawPrompt
from omni_actors.stages.refusal import refuse_unknown_tokens, validated
from omni_actors.stages.sources import OpenSources

_NONE: Mapping[str, Any] = {}


class TranscriptData(msgspec.Struct, frozen=True):
    """The ``data`` of a chunk with a piece of a transcript."""

    text: str = ""
    index: conversation.Index = 0


class Prompt:
    """Collects the input of one request. It is complete when every source has sent its last chunk.

    may_be_empty: whether a conversation without text is a prompt too.
    """

    def __init__(self, sources: Sequence[str], *, may_be_empty: bool = False) -> None:
        self._may_be_empty = may_be_empty
        self._open = OpenSources(sources)
        self._has_transcripts = set(sources) != {CLIENT}
        self.raw = RawPrompt()
        self.messages: list[Message] = []
        """The messages that the client has sent."""
        self._transcripts: defaultdict[int, str] = defaultdict(str)

    def feed(self, chunk: Chunk) -> bool:
        """Take a chunk. Return whether the input is complete. Raises InvalidRequest."""
        if chunk.source == CLIENT:
            self.raw.feed(chunk)
            self.messages += validated(chunk.data, conversation.ConversationData).messages
            self.raw.require_alone(self.messages)
        else:
            piece = validated(chunk.data, TranscriptData)
            self._transcripts[piece.index] += piece.text
        self._open.update(chunk)
        return not self._open

    def negative(self, text: str) -> Prompt:
        """Return a prompt of the same kind, raw or a conversation, that is a client's negative prompt."""
        made = Prompt((CLIENT,), may_be_empty=True)
        if self.raw:
            made.raw.text = text
        else:
            made.messages.append(Message("user", text))
        return made

    def encode(
        self,
        vocabulary: Vocabulary,
        system_prompt: str,
        context: int,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        template_kwargs: Mapping[str, Any] = _NONE,
        kwargs: TokenizationKwargs = DEFAULT_TOKENIZATION,
    ) -> list[int]:
        """Return the prompt's tokens, which may still be too many for the context.

        tools, template_kwargs: see ``render``. kwargs: the request's.

        A prompt that cannot fit, cut or not, is refused as early as possible: rendering and tokenizing take time in
        proportion to its length, and all other requests wait meanwhile. A message has at least one token in any chat
        template.
        Raises InvalidRequest: as ``render``, or the prompt cannot fit into the context, or the model lacks a token.
        """
        if self.raw:
            if tools:
                raise InvalidRequest("tools: the chat template renders them; a raw prompt bypasses it", param="tools")
            return self._raw_tokens(vocabulary, context, kwargs)
        count = len(self.messages)
        refuse_beyond_context(kwargs.least(count), f"{count} messages of at least 1 token", context)
        text = self.render(vocabulary.tokenizer, system_prompt, tools, template_kwargs)
        length = control_tokens.length(text)
        least = kwargs.least(math.ceil(length / vocabulary.longest))
        refuse_beyond_context(least, f"{length} characters, which are at least {least} tokens,", context)
        tokens = kwargs.cut(control_tokens.encode(vocabulary.tokenizer, text))
        refuse_unknown_tokens(tokens, vocabulary.size, "messages")
        return tokens

    def _raw_tokens(self, vocabulary: Vocabulary, context: int, kwargs: TokenizationKwargs) -> list[int]:
        if self._has_transcripts:
            raise InvalidRequest("audio was sent, and a raw prompt has no place for its transcript", param="prompt")
        least = self.raw.least_tokens(vocabulary.longest, kwargs)
        refuse_beyond_context(least, f"at least {least} tokens", context)
        return self.raw.tokens(vocabulary.tokenizer, vocabulary.size, kwargs)

    def render(
        self,
        tokenizer: Any,
        system_prompt: str,
        tools: Sequence[Mapping[str, Any]] = (),
        kwargs: Mapping[str, Any] = _NONE,
    ) -> str:
        """Return the prompt's text, special tokens and marks included, up to where the model's answer begins.

        Marks: see ``control_tokens``.
        tokenizer: a transformers tokenizer with a chat template. system_prompt: for a conversation without one. tools:
        the functions that the model may call. kwargs: variables of the chat template.
        Raises InvalidRequest: there is nothing to answer, or the chat template refuses the conversation.
        """
        sent = self.messages or [Message("user", [AudioPart(index) for index in sorted(self._transcripts)])]
        messages = [self._rendered(message) for message in conversation.with_system_prompt(sent, system_prompt)]
        turns = [message for message in sent if message.role != "system"]
        has_text = any(self._text(message).strip() for message in turns or sent)
        if not (has_text or self._may_be_empty):
            raise InvalidRequest("the prompt is empty: no message has text", param="messages")
        given = list(tools) or None
        has_tools = given is not None or any(message.has_tools for message in sent)
        template = tokenizer.get_chat_template(tools=given)
        control = control_tokens.ControlTokens.of(tokenizer, template)
        messages, given = control.marked_messages(messages), control.marked(given)
        kwargs = control.marked_kwargs(kwargs)
        if has_tools and not knows_tools(template):
            messages, given = tools_as_text(messages, given or ()), None
        text: str = applied(tokenizer, messages, kwargs, tools=given, tokenize=False)
        return text

    def _rendered(self, message: Message) -> RenderedMessage:
        """Return a message as chat templates take it."""
        rendered: RenderedMessage = {"role": message.role, "content": self._text(message)}
        if message.name is not None:
            rendered["name"] = message.name
        if message.tool_calls:
            rendered["tool_calls"] = [_rendered_call(call) for call in message.tool_calls]
        if message.role == "tool":
            rendered["tool_call_id"] = message.tool_call_id or ""
        return rendered

    def _text(self, message: Message) -> str:
        if isinstance(message.content, str):
            return message.content
        return "\n".join(text for part in message.content if (text := self._part(part)))

    def _part(self, part: TextPart | MediaPart) -> str:
        if isinstance(part, TextPart):
            return part.text
        if not isinstance(part, AudioPart):
            raise InvalidRequest(f"{part.kind} was sent, and this model reads text only", param="messages")
        if not self._has_transcripts:
            raise InvalidRequest("audio was sent, and no upstream stage transcribes it", param="messages")
        return self._transcripts[part.index].strip()


def conversation_tokens(
    tokenizer: Any,
    system_prompt: str,
    chunk: Chunk,
    tools: Sequence[Mapping[str, Any]],
    kwargs: Mapping[str, Any] = _NONE,
) -> list[int]:
    """Return the tokens of a conversation, a chunk with messages. Raises as ``Prompt.feed`` and ``Prompt.render``."""
    prompt = Prompt([CLIENT])
    prompt.feed(chunk)
    return control_tokens.encode(tokenizer, prompt.render(tokenizer, system_prompt, tools, kwargs))


def _rendered_call(call: ToolCall) -> dict[str, Any]:
    """Return a call as chat templates take it. Raises InvalidRequest: its arguments are not a JSON object."""
    arguments = call.function.arguments
    if isinstance(arguments, str):
        try:
            arguments = msgspec.json.decode(arguments, type=dict[str, Any])
        except (msgspec.DecodeError, UnicodeError) as error:
            message = f"messages: the arguments of a call of {call.function.name!r} are not a JSON object: {error}"
            raise InvalidRequest(message, param="messages") from error
    return {"id": call.id or "", "type": call.type, "function": {"name": call.function.name, "arguments": arguments}}
