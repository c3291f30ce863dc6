"""The events that clients send."""

from __future__ import annotations

from typing import Annotated, Any, TypeAlias

import msgspec
from msgspec import Meta

from omni_actors.serve.api.json_body import decode
from omni_actors.serve.realtime.config import ResponseParams, convert
from omni_actors.serve.realtime.items import FunctionCall, FunctionCallOutput, ItemId, Message

EventId = Annotated[str, Meta(max_length=512)]


class _Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", forbid_unknown_fields=True):
    event_id: EventId | None = None
    """The client's name of the event. An error event that the event causes has it."""


class SessionUpdate(_Event, frozen=True, tag="session.update"):
    session: dict[str, Any]


class InputAudioAppend(_Event, frozen=True, tag="input_audio_buffer.append"):
    audio: str


class InputAudioCommit(_Event, frozen=True, tag="input_audio_buffer.commit"):
    pass


class InputAudioClear(_Event, frozen=True, tag="input_audio_buffer.clear"):
    pass


class OutputAudioClear(_Event, frozen=True, tag="output_audio_buffer.clear"):
    pass


class ItemCreate(_Event, frozen=True, tag="conversation.item.create"):
    item: Message | FunctionCall | FunctionCallOutput
    previous_item_id: ItemId | None = None


class ItemTruncate(_Event, frozen=True, tag="conversation.item.truncate"):
    item_id: ItemId
    content_index: Annotated[int, Meta(ge=0, le=0)]
    audio_end_ms: Annotated[int, Meta(ge=0, le=1 << 40)]


class ItemDelete(_Event, frozen=True, tag="conversation.item.delete"):
    item_id: ItemId


class ItemRetrieve(_Event, frozen=True, tag="conversation.item.retrieve"):
    item_id: ItemId


class ResponseCreate(_Event, frozen=True, tag="response.create"):
    response: ResponseParams | None = None


class ResponseCancel(_Event, frozen=True, tag="response.cancel"):
    response_id: ItemId | None = None


ClientEvent: TypeAlias = (
    SessionUpdate
    | InputAudioAppend
    | InputAudioCommit
    | InputAudioClear
    | OutputAudioClear
    | ItemCreate
    | ItemTruncate
    | ItemDelete
    | ItemRetrieve
    | ResponseCreate
    | ResponseCancel
)


_OPTIONAL = ("item", "response", "tools", "turn_detection")
"""Fields of events within which null means the same as an absent field."""
_OPAQUE = ("metadata", "parameters")
"""Fields whose content is the client's own."""


def read_event(fields: dict[str, Any]) -> ClientEvent:
    """Return a client's event. Raises HTTPError."""
    return convert(_without_nulls(fields), ClientEvent, "")  # type: ignore[arg-type]  # a union is not a type to mypy


def _without_nulls(value: Any, *, is_within: bool = False) -> Any:
    """Return a client's value without the nulls within ``_OPTIONAL``. is_within: whether it is within one of these."""
    if isinstance(value, list):
        return [_without_nulls(each, is_within=is_within) for each in value]
    if not isinstance(value, dict):
        return value
    return {
        name: each if name in _OPAQUE else _without_nulls(each, is_within=is_within or name in _OPTIONAL)
        for name, each in value.items()
        if not (is_within and each is None)
    }


async def read_fields(text: str) -> dict[str, Any]:
    """Return the fields of a client's event, without the nulls at its top. Raises HTTPError."""
    return await decode(text.encode("utf-8", "replace"), "event")
