"""The items of a conversation, as they are sent and received."""

from __future__ import annotations

import uuid
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta

from omni_actors.serve.api.tools import Name
from omni_actors.serve.http.errors import bad_request

Status: TypeAlias = Literal["in_progress", "completed", "incomplete"]
ItemId = Annotated[str, Meta(min_length=1, max_length=64)]

_PARTS = {
    "user": ("input_text", "input_audio"),
    "system": ("input_text",),
    "assistant": ("output_text", "output_audio"),
}
"""The types of content that a message of each role may have."""
_FIELDS = {
    "input_text": ("text",),
    "input_audio": ("audio", "transcript"),
    "output_text": ("text",),
    "output_audio": ("transcript", "audio"),
}
"""The fields that a part of each type may have. The first one is required."""


class Part(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True):
    """A part of a message. audio: base64 in the session's format. transcript: the words of the audio."""

    type: Annotated[
        Literal["input_text", "input_audio", "output_text", "output_audio"],
        Meta(description="'input_text', 'input_audio', 'output_text', 'output_audio'; pictures are not accepted"),
    ]
    text: str | None = None
    audio: str | None = None
    transcript: str | None = None

    @property
    def words(self) -> str:
        """The text, or the words of the audio as far as they are known."""
        return self.text or self.transcript or ""


class _Item(msgspec.Struct, kw_only=True, tag_field="type", forbid_unknown_fields=True):
    id: ItemId = msgspec.field(default_factory=lambda: new_id("item"))
    object: Literal["realtime.item"] = "realtime.item"
    status: Status = "completed"


class Message(_Item, tag="message", kw_only=True):
    """What the user, the assistant or the system says."""

    role: Literal["user", "assistant", "system"]
    content: Annotated[list[Part], Meta(max_length=64)]


class FunctionCall(_Item, tag="function_call", kw_only=True):
    """A call of a function by the model. arguments: a JSON object, as text."""

    name: Name
    arguments: str
    call_id: ItemId = msgspec.field(default_factory=lambda: new_id("call"))


class FunctionCallOutput(_Item, tag="function_call_output", kw_only=True):
    """What a function returned."""

    call_id: ItemId
    output: str


class ItemReference(msgspec.Struct, tag_field="type", tag="item_reference", forbid_unknown_fields=True):
    """An item of the conversation, in the input of a response."""

    id: ItemId


Item: TypeAlias = Message | FunctionCall | FunctionCallOutput


def new_id(prefix: str) -> str:
    """Return a new identifier of at most 32 characters."""
    return f"{prefix}_{uuid.uuid4().hex[:24]}"


def check_item(item: Item, param: str = "item") -> None:
    """Refuse a client's message whose parts do not fit its role, or have fields of another type. Raises HTTPError."""
    if not isinstance(item, Message):
        return
    for index, part in enumerate(item.content):
        place = f"{param}.content[{index}]"
        if part.type not in _PARTS[item.role]:
            accepted = ", ".join(map(repr, _PARTS[item.role]))
            message = f"{place}.type: a message of the {item.role} cannot have {part.type!r}; accepted: {accepted}"
            raise bad_request(message, f"{place}.type")
        fields = _FIELDS[part.type]
        if getattr(part, fields[0]) is None:
            field = f"{place}.{fields[0]}"
            raise bad_request(f"{field} is missing", field, "missing_required_parameter")
        for name in ("text", "audio", "transcript"):
            if name not in fields and getattr(part, name) is not None:
                accepted = ", ".join(map(repr, fields))
                message = f"{place}.{name}: {part.type!r} has no such field; accepted: {accepted}"
                raise bad_request(message, f"{place}.{name}", "unknown_parameter")


def wire(item: Item, *, with_audio: bool = False) -> dict[str, Any]:
    """Return an item as it is sent. Audio is left out, unless the client retrieves the item."""
    found: dict[str, Any] = msgspec.to_builtins(item)
    for part in found.get("content", ()):
        if not with_audio:
            part.pop("audio", None)
    return found
