"""One session: takes a client's events in order, and keeps its conversation.

Rules
1. A bad event changes nothing. It is answered with an ``error`` event that names it, and the session goes on. Only a
   binary frame (1003) and what breaks the framing end it.
2. A response runs in a task of its own, so that events are taken meanwhile (``session_responses``).
3. Everything that a client can make grow has a bound in ``SessionLimits``.
4. The session ends with an ``error`` event and close code 1000 when its time is over, and with 1001 when the server
   drains and no response is in progress. Those that are when the time of the drain is over fail.
5. Sound of the user arrives in ``_take_sound`` alone.
6. No exception ends the nursery of a session. Its traceback would be in a cycle with the session, whose recordings
   would stay in memory until the next full collection, which is rare (``system.garbage``).
"""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Any

import msgspec
import trio
from msgspec import UNSET
from starlette.websockets import WebSocket, WebSocketDisconnect

from omni_actors.errors import Aborted, OmniError
from omni_actors.serve.api.errors import renaming, to_http_error
from omni_actors.serve.http.errors import HTTPError, bad_request
from omni_actors.serve.http.websocket import Drain
from omni_actors.serve.media.base64_data import from_base64
from omni_actors.serve.realtime import events
from omni_actors.serve.realtime.config import ResponseParams, SessionConfig, to_wire, updated
from omni_actors.serve.realtime.conversation import Conversation, Entry
from omni_actors.serve.realtime.input_audio import InputAudio
from omni_actors.serve.realtime.items import ItemReference, Message, Part, new_id
from omni_actors.serve.realtime.outbox import Outbox
from omni_actors.serve.realtime.pipeline import SessionPipeline
from omni_actors.serve.realtime.response import Response
from omni_actors.serve.realtime.response_settings import ResponseSettings
from omni_actors.serve.realtime.session_responses import SessionResponses
from omni_actors.serve.realtime.tools import require_tools
from omni_actors.serve.realtime.transcribing import Transcriber
from omni_actors.serve.realtime.turn_taking import TurnItem, TurnTaking, can_detect, open_turn_taking
from omni_actors.serve.realtime.user_items import UserItems
from omni_actors.system import OmniSystem

NORMAL_CLOSURE, GOING_AWAY, UNSUPPORTED_DATA = 1000, 1001, 1003
LAST_EVENT_S = 1.0
"""The time that a client has to take the events before the end of its session."""


class SessionLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The bounds of one session. longest_turn_s: the most sound of one turn of the user."""

    duration_s: float
    max_items: int
    max_bytes: int
    longest_turn_s: float = 120.0


class Session:
    """A session on an accepted WebSocket.

    Args:
        websocket: the connection.
        system: the running pipeline.
        limits: see rule 3.
        model: the name that the client gave, or the pipeline's.
        params: parameters of the engines for every response.
        drain: of the server. It ends the session.
    """

    def __init__(
        self,
        websocket: WebSocket,
        system: OmniSystem,
        limits: SessionLimits,
        *,
        model: str,
        params: dict[str, Any],
        drain: Drain,
    ) -> None:
        self._websocket, self._limits, self._params, self._drain = websocket, limits, params, drain
        self.id = new_id("sess")
        self._pipeline = SessionPipeline(system, self.id, limits.duration_s)
        self._config = SessionConfig(
            type="realtime",
            model=model,
            output_modalities=["audio" if self._pipeline.speaks else "text"],
            max_output_tokens=self._pipeline.default_tokens or "inf",
        )
        self._expires = int(time.time() + limits.duration_s)
        self._outbox = Outbox(websocket)
        self._conversation = Conversation(max_items=limits.max_items, max_bytes=limits.max_bytes)
        self._input = InputAudio(limits.longest_turn_s)
        transcriber = Transcriber(self._pipeline, self._outbox, limits.max_bytes)
        self._items = UserItems(
            self._pipeline,
            self._outbox,
            self._conversation,
            transcriber=transcriber,
            longest_s=limits.longest_turn_s,
        )
        self._responses = SessionResponses(self._pipeline, self._outbox, self._conversation)
        self._turn_item = TurnItem()
        self._turns: TurnTaking | None = None
        """Finds the turns of the user; None if the client marks them."""
        self._nursery: trio.Nursery | None = None
        self._close_code: int | None = NORMAL_CLOSURE

    async def run(self) -> None:
        """Run the session until either side ends it. Its requests have ended when this returns."""
        await self._begin_turns()
        async with trio.open_nursery() as self._nursery:
            for task in (self._send_events, self._items.run, self._watch_drain, self._watch_expiry):
                self._nursery.start_soon(task)
            self._outbox.post("session.created", session=self._described())
            await self._take_events()
        self._nursery = self._turns = None
        if self._close_code is not None:
            await self._websocket.close(self._close_code)

    async def _send_events(self) -> None:
        with suppress(WebSocketDisconnect):
            await self._outbox.run()
        self._end(None)

    async def _watch_expiry(self) -> None:
        """End the session when its time is over."""
        await trio.sleep(self._limits.duration_s)
        message = f"the session's {self._limits.duration_s:g} s are over"
        self._outbox.post_error(HTTPError(400, message, code="session_expired"))
        with trio.move_on_after(LAST_EVENT_S):
            await self._outbox.wait_sent()
        self._end(NORMAL_CLOSURE)

    async def _watch_drain(self) -> None:
        """End the session when the server drains and no response is in progress. At last none is."""
        await self._drain.begun.wait()
        assert self._nursery is not None
        self._nursery.start_soon(self._fail_responses)
        while in_progress := self._responses.in_progress:
            await in_progress[0].done.wait()
        await self._outbox.wait_sent()
        self._end(GOING_AWAY)

    async def _fail_responses(self) -> None:
        """End the responses that are in progress when the drain is over, also one whose sound alone is left."""
        await self._drain.over.wait()
        for response in self._responses.in_progress:
            response.fail(Aborted("the server is shutting down"))

    def _end(self, code: int | None) -> None:
        """End the session. code: with which the WebSocket is closed, unless the client has gone; None: it has."""
        if self._close_code is not None:
            self._close_code = code
        assert self._nursery is not None
        self._nursery.cancel_scope.cancel()

    async def _take_events(self) -> None:
        """Take the client's events until it has gone."""
        while True:
            message = await self._websocket.receive()
            if message["type"] == "websocket.disconnect":
                self._end(None)
                return
            if (text := message.get("text")) is None:
                self._end(UNSUPPORTED_DATA)
                return
            await self._outbox.wait_room()
            event_id: str | None = None
            try:
                fields = await events.read_fields(text)
                found = fields.get("event_id")
                event_id = found[:512] if isinstance(found, str) else None
                await self._take(events.read_event(fields))
            except HTTPError as error:
                self._outbox.post_error(error, event_id)
            except OmniError as error:
                self._outbox.post_error(to_http_error(error), event_id)

    async def _take(self, event: events.ClientEvent) -> None:
        """Do what an event asks. Raises HTTPError, OmniError."""
        match event:
            case events.SessionUpdate(session=session):
                await self._update(session)
            case events.InputAudioAppend(audio=audio):
                await self._take_sound(await from_base64(audio, "audio"))
            case events.InputAudioCommit():
                self.commit_turn(None, self._turn_item.id)
                self._forget_turn()
            case events.InputAudioClear():
                self._forget_turn()
                self._input.clear(self._config.audio.input.format)
                self._outbox.post("input_audio_buffer.cleared")
            case events.ItemCreate(item=item, previous_item_id=after):
                await self._items.create(item, after, self._config)
            case events.ItemTruncate(item_id=id, audio_end_ms=end_ms):
                await self._responses.truncate(id, end_ms)
            case events.ItemDelete(item_id=id):
                self._conversation.delete(id)
                self._outbox.post("conversation.item.deleted", item_id=id)
            case events.ItemRetrieve(item_id=id):
                self._outbox.post("conversation.item.retrieved", item=await self._conversation.find(id).retrieved())
            case events.ResponseCreate(response=asked):
                for each in asked.input or () if asked is not None else ():
                    if not isinstance(each, ItemReference):
                        await self._items.check_tools(each, "response.input")
                self._respond(asked or ResponseParams())
            case events.ResponseCancel(response_id=id):
                await self._responses.cancel(id)
            case events.OutputAudioClear():
                await self._responses.clear_sound()

    # the session

    def _described(self) -> dict[str, Any]:
        described = {"id": self.id, "object": "realtime.session", "expires_at": self._expires}
        return {**to_wire(self._config), **described}

    async def _update(self, update: dict[str, Any]) -> None:
        """Raises HTTPError."""
        config = updated(self._config, update)
        if config.model != self._config.model:
            raise bad_request("session.model: a session keeps its model", "session.model")
        if config.audio.input.format != self._config.audio.input.format and self._input.nbytes:
            message = "session.audio.input.format: the input audio buffer is not empty; commit or clear it"
            raise bad_request(message, "session.audio.input.format")
        self._check_modalities(config, "session.")
        require_tools(config, "session.", is_chosen="tool_choice" in update)
        await self._check_transcription(config)
        ResponseSettings(config, ResponseParams(), self._pipeline.system.pipeline, self._params)
        before = self._turns
        await self._adopt(config)
        self._outbox.post("session.updated", session=self._described())
        if self._turns is not None and self._turns is not before:
            await self._turns.hear_buffer()

    async def _check_transcription(self, config: SessionConfig) -> None:
        """Raises HTTPError."""
        before, asked = (each.audio.input.transcription for each in (self._config, config))
        if asked is not None and (asked.language is not None or asked.prompt) and asked != before:
            place = "session.audio.input.transcription"
            with renaming({"language": f"{place}.language", "initial_prompt": f"{place}.prompt"}):
                await self._pipeline.check_transcription(asked)

    def _check_modalities(self, config: SessionConfig, place: str) -> None:
        """Raises HTTPError."""
        name = self._pipeline.system.pipeline.name
        if "audio" in config.output_modalities and not self._pipeline.speaks:
            param = f"{place}output_modalities"
            raise bad_request(f"{param}: {name!r} does not speak; accepted: ['text']", param, "unsupported_modality")
        if config.tools and not self._pipeline.takes_tools:
            message = f"{place}tools: no stage of {name!r} takes tools; accepted: []"
            raise bad_request(message, f"{place}tools", "unsupported_parameter")

    # sound of the user

    async def _adopt(self, config: SessionConfig) -> None:
        """Use a configuration, and find turns as it says. Raises HTTPError: a model is not there."""
        before, asked = self._config.audio.input, config.audio.input
        detection = asked.turn_detection
        if detection is None:
            self._turns = None
        elif (detection, asked.format) != (before.turn_detection, before.format):
            self._pipeline.require_hearing()
            self._turns = await open_turn_taking(
                detection,
                self,
                self._input,
                self._turn_item,
                format=asked.format,
                outbox=self._outbox,
                before=self._turns,
            )
        self._config = config

    async def _begin_turns(self) -> None:
        """Find turns with ``server_vad``, as OpenAI does, if the pipeline hears and the model is there."""
        if self._pipeline.hears and can_detect():
            await self._adopt(updated(self._config, {"audio": {"input": {"turn_detection": {"type": "server_vad"}}}}))

    async def _take_sound(self, data: bytes) -> None:
        """Add sound to the buffer. Raises HTTPError."""
        self._pipeline.require_hearing()
        if self._turns is None:
            self._input.append(data, self._config.audio.input.format)
        else:
            await self._turns.hear(data)

    def _forget_turn(self) -> None:
        """Forget the turn in progress: the client takes or drops its sound."""
        self._turn_item.take()
        if self._turns is not None:
            self._turns.reset()

    def commit_turn(self, until_ms: float | None, item_id: str) -> None:
        """Make an item of the buffer's sound; with ``until_ms``, of that before the position. Raises HTTPError."""
        self._pipeline.require_hearing()
        format = self._config.audio.input.format
        recording = self._input.recording(format, until_ms)
        entry = Entry(Message(id=item_id, role="user", content=[Part("input_audio")]), {0: recording})
        self._items.add(entry, self._config, is_committed=True)
        if until_ms is None:
            self._input.clear(format)
        else:
            self._input.forget(until_ms, format)

    # what turn taking asks

    def is_answering(self) -> bool:
        """Return whether a response of the conversation is in progress."""
        return self._responses.current is not None

    def is_playing(self) -> bool:
        """Return whether an answer is computed or, as far as the server knows, played."""
        return self._responses.is_playing()

    def is_heard(self, since_s: float) -> bool:
        """Return whether an answer is played, as far as the server knows, and has been for more than ``since_s``."""
        return self._responses.is_heard(since_s)

    def unplayed_s(self) -> float:
        """Return how long answers of the conversation will be played, as far as the server knows."""
        return self._responses.unplayed_s()

    def respond_to_turn(self, *, is_spoken: bool) -> None:
        """Begin a response, unless one of the conversation is in progress or there are none. Raises HTTPError."""
        if self._pipeline.answers and self._responses.current is None:
            self._respond(ResponseParams(), needs_words=is_spoken)

    async def interrupt(self) -> None:
        """Cut the answer because the user speaks, and keep of it what was played. Raises HTTPError."""
        await self._responses.interrupt()

    # responses

    def _respond(self, asked: ResponseParams, *, needs_words: bool = False) -> None:
        """Begin a response. needs_words: see ``Response``. Raises HTTPError."""
        if not self._pipeline.answers:
            message = f"{self._pipeline.system.pipeline.name!r} only transcribes, so there are no responses"
            raise bad_request(message, None, "unsupported_modality")
        config = asked.applied_to(self._config)
        self._check_modalities(config, "response.")
        require_tools(config, "response.", is_chosen=asked.tool_choice is not UNSET)
        response = self._responses.begin(self._config, asked, self._params, needs_words=needs_words)
        self._items.transcribe_again(response.entries, self._config)
        assert self._nursery is not None
        self._nursery.start_soon(self._run_response, response)

    async def _run_response(self, response: Response) -> None:
        await self._responses.run(response)
        if self._turns is not None and not response.is_apart:
            self._turns.expect_speech(self.unplayed_s())
