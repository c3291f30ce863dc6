"""Realtime sessions as clients see them. Every event is checked against the types of OpenAI's own client."""

from __future__ import annotations

import functools
import json
import typing
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import openai.types.realtime as types
import pydantic
import soxr
from openai import BaseModel
from openai.types.realtime.realtime_server_event import RealtimeServerEvent
from websockets.sync.client import ClientConnection, connect

from omni_actors import turns
from omni_actors.serve.media.audio import Floats, pcm16
from omni_actors.serve.media.base64_data import to_base64
from tests.support.http_server import WATCHDOG_S, Api

PCM_S = 48_000
"""Bytes of a second of PCM16 at 24 kHz."""
SESSION_FIELDS = {"id", "object", "expires_at"}
"""What OpenAI's server sends of a session beside what its client sends. The client's type of the answer lacks it."""


class Session:
    """A connection. It collects the events."""

    def __init__(self, websocket: ClientConnection) -> None:
        self.websocket = websocket

    def send(self, type: str, **fields: Any) -> None:
        self.websocket.send(json.dumps({"type": type, **fields}))

    def receive(self) -> dict[str, Any]:
        """Return the next event."""
        text = self.websocket.recv(WATCHDOG_S)
        assert isinstance(text, str)
        event: dict[str, Any] = json.loads(text)
        check_event(event)
        return event

    def until(self, type: str) -> list[dict[str, Any]]:
        """Return the events up to the first one of this type."""
        found = [self.receive()]
        while found[-1]["type"] != type:
            found.append(self.receive())
        return found

    def ask(self, text: str) -> dict[str, Any]:
        """Add a message of the user; return its item."""
        content = [{"type": "input_text", "text": text}]
        self.send("conversation.item.create", item={"type": "message", "role": "user", "content": content})
        item: dict[str, Any] = self.until("conversation.item.done")[-1]["item"]
        return item

    def hear(self, sound: bytes, size: int = PCM_S // 2 + 1) -> None:
        """Send sound of the user, in parts of ``size`` bytes. By default frames are cut."""
        for audio in parts(sound, size):
            self.send("input_audio_buffer.append", audio=audio)

    def respond(self, **response: Any) -> list[dict[str, Any]]:
        """Return the events of a response."""
        self.send("response.create", response=response)
        return self.until("response.done")

    def error(self, type: str, **fields: Any) -> dict[str, Any]:
        """Send a bad event; return the error."""
        self.send(type, event_id="mine", **fields)
        event = self.receive()
        assert event["type"] == "error", event
        assert event["error"]["event_id"] == "mine"
        error: dict[str, Any] = event["error"]
        return error


def pcm(sound: Floats, rate: int = turns.SAMPLE_RATE) -> bytes:
    """Return PCM16 at 24 kHz of a sound: float32 (n,), at ``rate``."""
    return pcm16(np.asarray(soxr.resample(sound, rate, 24_000), np.float32)).tobytes()


def silence(seconds: float) -> bytes:
    """Return PCM16 at 24 kHz."""
    return bytes(2 * round(24_000 * seconds))


def parts(sound: bytes, size: int) -> Iterator[str]:
    """Yield sound as base64, ``size`` bytes at a time."""
    for at in range(0, len(sound), size):
        yield to_base64(sound[at : at + size])


@contextmanager
def session(api: Api, *, query: str = "", **options: Any) -> Iterator[Session]:
    """A session whose first event was received."""
    url = f"ws://127.0.0.1:{api.port}/v1/realtime{query}"
    # While its queue is full, this client reads nothing, not even the end of the connection: it waits 10 s for that.
    options = {"max_queue": None, **options}
    with connect(url, open_timeout=WATCHDOG_S, compression=None, max_size=None, **options) as websocket:
        found = Session(websocket)
        assert found.receive()["type"] == "session.created"
        yield found


def check_event(event: dict[str, Any]) -> None:
    """Fail if an event is not exactly one of the client's types: a field is missing, unknown or of another type."""
    adapter = _adapters()[event["type"]]
    if event["type"].startswith("session."):
        shown = {name: value for name, value in event["session"].items() if name not in SESSION_FIELDS}
        assert event["session"].keys() - shown.keys() == SESSION_FIELDS
        event = {**event, "session": shown}
    adapter.validate_python(event, strict=True)


@functools.cache
def _adapters() -> dict[str, pydantic.TypeAdapter[Any]]:
    """Return the client's types by event, so that they refuse unknown fields, also in the objects within."""
    members = typing.get_args(typing.get_args(RealtimeServerEvent)[0])
    found = {}
    for member in members:
        [name] = typing.get_args(member.model_fields["type"].annotation)
        found[name] = pydantic.TypeAdapter(_strict(member))
    return found


@functools.cache
def _strict(model: type[BaseModel]) -> type[BaseModel]:
    fields: dict[str, Any] = {name: (_strictly(field.annotation), field) for name, field in model.model_fields.items()}
    config = pydantic.ConfigDict(extra="forbid")
    made: type[BaseModel] = pydantic.create_model(f"Strict{model.__name__}", __config__=config, **fields)
    return made


def _strictly(annotation: Any) -> Any:
    """Return a type annotation in which each of the client's models is replaced by its strict form."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return _strict(annotation)
    arguments = typing.get_args(annotation)
    origin = typing.get_origin(annotation)
    if not arguments or origin is typing.Literal:
        return annotation
    if origin is typing.Annotated:
        return _strictly(arguments[0])
    replaced = tuple(_strictly(each) for each in arguments)
    if origin in (list, dict):
        return origin[replaced if len(replaced) > 1 else replaced[0]]
    return typing.Union[replaced]  # noqa: UP007  # of a tuple


__all__ = ["PCM_S", "Session", "check_event", "parts", "pcm", "session", "silence", "types"]
