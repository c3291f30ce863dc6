"""The items that the user adds to the conversation of one session: turns, and what the client creates.

Rule: an item that is refused changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from omni_actors.serve.api.tools import checked_arguments
from omni_actors.serve.http.errors import bad_request
from omni_actors.serve.media.base64_data import from_base64
from omni_actors.serve.realtime.chat_messages import call_of
from omni_actors.serve.realtime.config import SessionConfig, Transcription
from omni_actors.serve.realtime.conversation import Conversation, Entry
from omni_actors.serve.realtime.input_audio import Recording, recording_of
from omni_actors.serve.realtime.items import FunctionCall, FunctionCallOutput, Item, Message, check_item, wire
from omni_actors.serve.realtime.outbox import Outbox
from omni_actors.serve.realtime.pipeline import SessionPipeline
from omni_actors.serve.realtime.transcribing import Transcriber, may_succeed


class UserItems:
    """Adds the items of the user, and has the words of their recordings written down.

    Args:
        pipeline: says what the items may be.
        outbox: receives the events.
        conversation: receives the items.
        transcriber: writes the words.
        longest_s: the longest recording of an item, in seconds.
    """

    def __init__(
        self,
        pipeline: SessionPipeline,
        outbox: Outbox,
        conversation: Conversation,
        transcriber: Transcriber,
        longest_s: float,
    ) -> None:
        self._pipeline, self._outbox, self._conversation = pipeline, outbox, conversation
        self._transcriber, self._longest_s = transcriber, longest_s

    async def run(self) -> None:
        """Transcribe until cancelled."""
        await self._transcriber.run()

    async def create(self, item: Item, after: str | None, config: SessionConfig) -> None:
        """Add an item that the client has made. after: as ``add`` takes it. Raises HTTPError."""
        check_item(item)
        await self.check_tools(item, "item")
        item.status = "completed"
        self.add(Entry(item, await self._recordings(item, config)), config, after)

    async def check_tools(self, item: Item, param: str) -> None:
        """Refuse calls of functions that the pipeline cannot be given. Raises HTTPError."""
        if isinstance(item, FunctionCall | FunctionCallOutput) and not self._pipeline.takes_tools:
            message = f"{param}.type: no stage of {self._pipeline.system.pipeline.name!r} takes tools"
            raise bad_request(f"{message}; accepted: 'message'", f"{param}.type", "unsupported_parameter")
        if isinstance(item, FunctionCall):
            await checked_arguments(call_of(item), f"{param}.arguments")

    async def _recordings(self, item: Item, config: SessionConfig) -> dict[int, Recording]:
        """Take the recordings out of a client's message. Raises HTTPError."""
        found: dict[int, Recording] = {}
        for index, part in enumerate(item.content if isinstance(item, Message) else ()):
            if part.type == "input_audio" and part.audio is not None:
                self._pipeline.require_hearing()
                place = f"item.content[{index}].audio"
                data = await from_base64(part.audio, place)
                found[index] = recording_of(data, config.audio.input.format, self._longest_s, place)
            part.audio = None
        return found

    def add(self, entry: Entry, config: SessionConfig, after: str | None = None, *, is_committed: bool = False) -> None:
        """Add an item, and announce it. Raises HTTPError.

        Args:
            entry: the item.
            config: the session's configuration.
            after: the identifier of the item before it; None: it is the last one.
            is_committed: whether it comes from the input audio buffer.
        """
        self._transcriber.check_room(entry.recorded_bytes)
        for id in self._conversation.add(entry, after, may_leave=config.truncation == "auto"):
            self._outbox.post("conversation.item.deleted", item_id=id)
        before = self._conversation.before(entry)
        if is_committed:
            self._outbox.post("input_audio_buffer.committed", previous_item_id=before, item_id=entry.item.id)
        for name in ("added", "done"):
            self._outbox.post(f"conversation.item.{name}", previous_item_id=before, item=wire(entry.item))
        self._transcribe(entry, config.audio.input.transcription)

    def _transcribe(self, entry: Entry, asked: Transcription | None) -> None:
        """Have the words of an entry's recordings written down, if the client or the pipeline needs them."""
        if entry.recordings and (asked is not None or self._pipeline.transcribes):
            self._transcriber.add(entry, asked)

    def transcribe_again(self, entries: Sequence[Entry], config: SessionConfig) -> None:
        """Have the words written down that a response needs and whose transcripts failed, if that may succeed now."""
        for entry in entries if self._pipeline.transcribes else ():
            has_failed = entry.words_known.is_set() and entry.error is not None and may_succeed(entry.error)
            if has_failed and self._transcriber.has_room(entry.recorded_bytes):
                self._transcribe(entry, config.audio.input.transcription)
