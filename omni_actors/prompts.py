"""Prompts: from what a caller writes to pieces of input.

A question is text, and a conversation is a list of messages: the model's chat template renders both. A *raw prompt*
bypasses the template. It is a mapping with one of the keys of ``RAW``, as in vLLM.
"""

from __future__ import annotations

from collections.abc import AsyncIterable, Mapping, Sequence
from typing import Any, TypeAlias, TypedDict, TypeGuard

import numpy as np

from omni_actors import media
from omni_actors.errors import InvalidRequest
from omni_actors.media import MultiModalData
from omni_actors.orchestrator.pieces import Input, Inputs, Segments

Messages: TypeAlias = Sequence[Mapping[str, Any]]
"""A conversation, as in OpenAI's chat API: ``{"role": "user", "content": "…"}``. The content may be a list of parts:
``{"type": "text", "text": "…"}``, or ``{"type": "audio", "index": 0}`` for the first of ``multi_modal_data["audio"]``;
"image" and "video" likewise."""


class _WithMedia(TypedDict, total=False):
    multi_modal_data: MultiModalData
    mm_processor_kwargs: Mapping[str, Any]


class ConversationPrompt(_WithMedia):
    """A conversation with its own media."""

    messages: Messages


class TextPrompt(_WithMedia):
    """A text that the model continues. Special tokens in it count, and so do the model's placeholders for media: the
    first "<|image_pad|>" is image 0."""

    prompt: str


class TokensPrompt(_WithMedia):
    """The token ids of a prompt, integers (n,), with placeholders as in ``TextPrompt``."""

    prompt_token_ids: Any


class EmbedsPrompt(TypedDict):
    """The model's input embeddings of a prompt, floating point (n, hidden): an array of numpy or a tensor of torch."""

    prompt_embeds: Any


Prompt: TypeAlias = str | Messages | ConversationPrompt | TextPrompt | TokensPrompt | EmbedsPrompt

RAW = ("prompt", "prompt_token_ids", "prompt_embeds")
"""The keys of raw prompts, which are also the names of what an engine can or cannot take (``errors.Unsupported``)."""
LONGEST_QUESTION = 16 * 1024 * 1024
"""Most characters of a question that arrives in parts: the system keeps it until it is complete."""
_KINDS = ("messages", *RAW)
_BESIDE = ("multi_modal_data", "mm_processor_kwargs")


def is_list_of_prompts(prompt: Any) -> TypeGuard[Sequence[Prompt]]:
    """Return whether ``prompt`` is a list of prompts, and neither one prompt nor a conversation."""
    if isinstance(prompt, str | Mapping) or not isinstance(prompt, Sequence):
        return False
    return any(isinstance(each, str | Sequence) or _is_keyed(each) for each in prompt)


def raw_kind(prompt: Any) -> str | None:
    """Return the key of a raw prompt; None for a question, a conversation and no prompt."""
    return next((kind for kind in RAW if kind in prompt), None) if isinstance(prompt, Mapping) else None


def processor_kwargs(prompt: Any, given: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the engines' parameters that a request's ``mm_processor_kwargs`` stand for.

    prompt: may bring them itself. given: those of the request, for a prompt that has no own.
    Raises InvalidRequest.
    """
    own = prompt.get("mm_processor_kwargs", given) if _is_keyed(prompt) else given
    if own is None:
        return {}
    if not isinstance(own, Mapping):
        message = f"mm_processor_kwargs: expected a mapping, found {own!r:.200}"
        raise InvalidRequest(message, param="mm_processor_kwargs")
    kwargs = dict(own)
    sound = {"use_audio_in_video": kwargs.pop("use_audio_in_video")} if "use_audio_in_video" in kwargs else {}
    return {**sound, "mm_processor_kwargs": kwargs} if kwargs or not sound else sound


def pieces(
    prompt: Any, multi_modal_data: MultiModalData | None, image: Any = None
) -> dict[str, Sequence[Input] | Segments]:
    """Return the pieces of input of a prompt and its media, by kind.

    prompt: a ``Prompt``, an iterator of the parts of a question, or None for media alone.
    multi_modal_data: the media of a prompt that has no own.
    image: the images among these media, given apart.
    Raises InvalidRequest: the prompt or a medium is of a wrong type.
    """
    if not _is_keyed(prompt):
        inputs = media.pieces(media.by_kind(multi_modal_data), image)
        if isinstance(prompt, AsyncIterable):
            inputs["messages"] = _live_question(prompt, inputs)
        elif prompt is not None:
            inputs["messages"] = [Input({"messages": media.conversation(prompt, inputs)})]
        return inputs
    if unknown := sorted(map(str, prompt.keys() - {*_KINDS, *_BESIDE})):
        raise _refusal(f"prompt: unknown key {unknown[0]!r}; accepted: {', '.join((*_KINDS, *_BESIDE))}")
    kind, *more = [kind for kind in _KINDS if kind in prompt]
    own, given = (media.by_kind(each) for each in (prompt.get("multi_modal_data"), multi_modal_data))
    if more or (own and given):
        twice = (kind, *more) if more else ("multi_modal_data", "multi_modal_data")
        raise _refusal(f"prompt: one of {twice[0]} and {twice[1]} was expected, and both were given")
    inputs = media.pieces(own or given, image)
    if inputs and kind == "prompt_embeds":
        raise InvalidRequest("prompt_embeds are a whole prompt: no media come with them", param="prompt_embeds")
    inputs["messages"] = [_PIECES[kind](prompt[kind], inputs)]
    return inputs


def script(text: str | AsyncIterable[str]) -> Sequence[Input] | Segments:
    """Return the input for a text to speak, which may arrive in parts. Raises InvalidRequest if it is neither."""
    if isinstance(text, AsyncIterable):
        return Segments(source=text, to_piece=lambda part: Input({"text": _part(part, "script")}))
    return [Input({"text": _part(text, "script")})]


def live(given: Sequence[Input] | AsyncIterable[Input] | Segments) -> Sequence[Input] | Segments:
    """Return input of one kind, with an iterator of its pieces as ``Segments``. Raises InvalidRequest."""
    if isinstance(given, list):  # first, because to ask for an abstract type takes ten times as long
        return given
    if isinstance(given, AsyncIterable):
        return Segments(source=given, to_piece=_piece)
    if not isinstance(given, Sequence | Segments | None):
        raise InvalidRequest(f"inputs: expected a list of pieces for each kind, found {given!r:.200}", param="inputs")
    return given


def _live_question(parts: AsyncIterable[str], inputs: Inputs) -> Segments:
    """Return the input for a question that arrives in parts. It is sent when it is complete."""
    arrived, size = list[str](), 0

    def take(part: Any) -> None:
        nonlocal size
        arrived.append(_part(part, "prompt"))
        size += len(part)
        if size > LONGEST_QUESTION or len(arrived) > LONGEST_QUESTION:
            raise _refusal(f"prompt: at most {LONGEST_QUESTION} characters, and as many parts, can arrive in parts")

    def finish() -> Input:
        return Input({"messages": media.conversation("".join(arrived), inputs)})

    return Segments(source=parts, to_piece=take, finish=finish)


def _piece(found: Any) -> Input:
    if not isinstance(found, Input):
        raise InvalidRequest(f"a piece of input was expected, not {type(found).__name__}")
    return found


def _part(found: Any, param: str) -> str:
    if not isinstance(found, str):
        raise InvalidRequest(f"{param}: expected text, found {found!r:.200}", param=param)
    return found


def _is_keyed(prompt: Any) -> bool:
    return isinstance(prompt, Mapping) and any(kind in prompt for kind in _KINDS)


def _messages(messages: Any, inputs: Inputs) -> Input:
    if isinstance(messages, str):
        raise InvalidRequest(f"messages: expected a list of messages, found {messages!r:.200}", param="messages")
    return Input({"messages": media.conversation(messages, inputs)})


def _text(text: Any, _: object) -> Input:
    if not isinstance(text, str):
        raise InvalidRequest(f"prompt: expected text, found {text!r:.200}", param="prompt")
    return Input({"prompt": text})


def _token_ids(given: Any, _: object) -> Input:
    found = _array(given, "prompt_token_ids")
    fits = found.dtype.kind in "iu" and found.ndim == 1 and found.size > 0
    if not fits or found.min() < 0 or found.max() >= 2**31:
        message = f"prompt_token_ids: token ids (n,) were expected, found {found.dtype} {found.shape}"
        raise InvalidRequest(message, param="prompt_token_ids")
    return Input({}, {"token_ids": np.ascontiguousarray(found, np.int64)})


def _embeds(given: Any, _: object) -> Input:
    found = _array(given, "prompt_embeds")
    if found.dtype.name not in ("float16", "float32", "float64") or found.ndim != 2 or not found.size:
        message = f"prompt_embeds: floating point (n, hidden) was expected, found {found.dtype} {found.shape}"
        raise InvalidRequest(message, param="prompt_embeds")
    return Input({}, {"embeds": np.ascontiguousarray(found)})


_PIECES = {"messages": _messages, "prompt": _text, "prompt_token_ids": _token_ids, "prompt_embeds": _embeds}


def _array(given: Any, param: str) -> np.ndarray[Any, Any]:
    """Return ``given`` as an array of numpy; a tensor of torch in bfloat16, which numpy lacks, in float32."""
    if hasattr(given, "detach"):  # torch, which the parent does not import
        given = given.detach().cpu()
        given = given.float() if str(given.dtype) == "torch.bfloat16" else given
    try:
        return np.asarray(given)
    except (ValueError, TypeError, OverflowError) as error:
        raise InvalidRequest(f"{param}: an array was expected: {error}", param=param) from error


def _refusal(message: str) -> InvalidRequest:
    return InvalidRequest(message, param="prompt")
