"""The responses of one session.

Rules
1. There is one response of the conversation at a time. Beside it run at most ``MOST_APART`` responses that are out of
   the conversation. They are no part of turn taking: speech does not cut them, and they keep no turn from an answer.
2. A response is cut in ``_cut`` alone. What follows in the conversation comes after its last events.
3. Responses of the conversation may be played at the client after their end, one after the other: ``pacer`` says what
   was played of each. A response counts as not playing when its sound is over, or speech or the client has stopped it.
   So speech never restores words that were dropped.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import trio

from omni_actors.serve.http.errors import bad_request, quote_value
from omni_actors.serve.realtime.config import ResponseParams, SessionConfig
from omni_actors.serve.realtime.conversation import Conversation, Entry, require_call
from omni_actors.serve.realtime.items import Item, ItemReference, Message, check_item, new_id
from omni_actors.serve.realtime.outbox import Outbox
from omni_actors.serve.realtime.pipeline import SessionPipeline
from omni_actors.serve.realtime.response import CancelReason, Response
from omni_actors.serve.realtime.response_settings import ResponseSettings

MOST_APART = 4
"""The most responses out of the conversation that are in progress at a time."""


class SessionResponses:
    """The responses of one session. current: the one of the conversation that is in progress."""

    def __init__(self, pipeline: SessionPipeline, outbox: Outbox, conversation: Conversation) -> None:
        self._pipeline, self._outbox, self._conversation = pipeline, outbox, conversation
        self._conversation_id = new_id("conv")
        self.current: Response | None = None
        self._playing: list[Response] = []
        """The responses of the conversation that may be played, in order: of those that have ended, all whose sound was
        not over when the newest one began (rule 3)."""
        self._latest_id: str | None = None
        """The identifier of the newest response of the conversation."""
        self._apart: dict[str, Response] = {}
        """The responses out of the conversation that are in progress."""

    @property
    def in_progress(self) -> list[Response]:
        """All responses in progress."""
        return [*([] if self.current is None else [self.current]), *self._apart.values()]

    def begin(
        self, config: SessionConfig, asked: ResponseParams, params: Mapping[str, Any], *, needs_words: bool
    ) -> Response:
        """Return a new response, for ``run``. Raises HTTPError.

        Args:
            config: the session's configuration.
            asked: what the response changes in it.
            params: parameters of the engines.
            needs_words: see ``Response``.
        """
        is_apart = asked.conversation == "none"
        if is_apart and len(self._apart) == MOST_APART:
            message = f"{MOST_APART} responses out of the conversation are in progress; wait for one, or cancel it"
            raise bad_request(message, None, "too_many_responses")
        if not is_apart and self.current is not None:
            message = f"the response {self.current.id} is in progress; wait for it, or cancel it"
            raise bad_request(message, None, "conversation_already_has_active_response")
        settings = ResponseSettings(config, asked, self._pipeline.system.pipeline, params)
        if not is_apart:
            settings.head["conversation_id"] = self._conversation_id
        given = None if asked.input is None else self._given(asked.input)
        if not is_apart:
            for id in self._conversation.make_room(may_leave=config.truncation == "auto"):
                self._outbox.post("conversation.item.deleted", item_id=id)
        entries = self._conversation.entries if given is None else given
        conversation = None if is_apart else self._conversation
        playing = [] if is_apart else self._still_playing()
        response = Response(
            self._pipeline,
            self._outbox,
            conversation,
            settings=settings,
            entries=entries,
            player_ends=playing[-1].pacer.ends if playing else None,
            needs_words=needs_words,
        )
        if is_apart:
            self._apart[response.id] = response
        else:
            self.current, self._playing = response, [*playing, response]
            self._latest_id = response.id
        return response

    async def run(self, response: Response) -> None:
        """Run a response to its end. Cancellation ends its requests, and sends nothing more."""
        await response.run()
        if response.is_apart:
            del self._apart[response.id]
        else:
            self.current = None
        response.done.set()

    def is_playing(self) -> bool:
        """Return whether an answer is computed or, as far as the server knows, played."""
        return self.current is not None or self.unplayed_s() > 0

    def is_heard(self, since_s: float) -> bool:
        """Return whether an answer is computed or played, and has been played for more than ``since_s``."""
        now = trio.current_time()
        return any(each.pacer.played_s(now) > since_s for each in self._still_playing())

    def unplayed_s(self) -> float:
        """Return how long answers of the conversation will be played, as far as the server knows."""
        now = trio.current_time()
        return max((each.pacer.unplayed_s(now) for each in self._playing), default=0.0)

    def _still_playing(self) -> list[Response]:
        """Return the responses that are in progress, or whose sound is not over."""
        now = trio.current_time()
        return [each for each in self._playing if each is self.current or each.pacer.unplayed_s(now) > 0]

    async def cancel(self, id: str | None) -> None:
        """End a response. id: its identifier; None: the response of the conversation. Raises HTTPError."""
        found = next((each for each in self.in_progress if each.id == id), self.current if id is None else None)
        if found is None:
            which = "no response is in progress" if id is None else f"the response {quote_value(id)} is not in progress"
            raise bad_request(which, "response_id", "response_cancel_not_active")
        await self._stop(found)

    async def clear_sound(self) -> None:
        """Drop the sound of all responses. It is no error if there is none left. Raises HTTPError."""
        if (id := self._latest_id) is None:
            raise bad_request("there was no response, so no sound waits", None, "output_audio_buffer_empty")
        self._playing.clear()
        if self.current is not None:
            await self._stop(self.current)
        self._outbox.post("output_audio_buffer.cleared", response_id=id)

    async def truncate(self, id: str, audio_end_ms: int) -> None:
        """Keep of a spoken answer what was heard in so many milliseconds. Raises HTTPError."""
        entry = self._conversation.check_truncation(id, audio_end_ms)
        for response in [each for each in self._playing if each.message is entry]:
            await self._stop(response)
        self._truncate(id, audio_end_ms)

    async def interrupt(self) -> None:
        """Cut the answers that play because the user speaks, and keep of each what was played. Raises HTTPError."""
        now = trio.current_time()
        played_ms = {each: int(1000 * each.pacer.played_s(now)) for each in self._still_playing()}
        if self.current in played_ms:
            await self._cut(self.current, "turn_detected")
        self._playing.clear()
        for response, end_ms in played_ms.items():
            entry = response.message
            if entry is not None and entry in self._conversation.entries and entry.is_spoken:
                self._truncate(entry.item.id, end_ms)

    def _truncate(self, id: str, audio_end_ms: int) -> None:
        self._conversation.truncate(id, audio_end_ms)
        self._outbox.post("conversation.item.truncated", item_id=id, content_index=0, audio_end_ms=audio_end_ms)

    def _given(self, items: Sequence[Item | ItemReference]) -> list[Entry]:
        """Return the entries of a response's input. Raises HTTPError."""
        referred = Counter(each.id for each in items if isinstance(each, ItemReference))
        for id, times in referred.items():
            if times > 1:
                message = f"response.input: the item {quote_value(id)} is referred to {times} times; accepted: once"
                raise bad_request(message, "response.input", "duplicate_item")
        entries = [self._given_entry(each) for each in items]
        for entry in entries:
            require_call(entry.item, entries, "response.input")
        if sum(entry.nbytes for entry in entries) > self._conversation.max_bytes:
            message = f"response.input has more than {self._conversation.max_bytes} bytes of text and recordings"
            raise bad_request(message, "response.input", "input_too_large")
        return entries

    def _given_entry(self, item: Item | ItemReference) -> Entry:
        if isinstance(item, ItemReference):
            return self._conversation.find(item.id, "response.input")
        check_item(item, "response.input")
        if isinstance(item, Message) and any(part.type == "input_audio" for part in item.content):
            message = "response.input: recordings come from the conversation; accepted: text and 'item_reference'"
            raise bad_request(message, "response.input", "unsupported_input")
        return Entry(item)

    async def _stop(self, response: Response) -> None:
        """Cut a response for the client, if it is in progress. From now on it counts as not playing.

        The player drops its sound, so it plays the responses behind it sooner.
        """
        if response in self._playing:
            place = self._playing.index(response)
            dropped_s = response.pacer.dropped_s(trio.current_time())
            for each in self._playing[place + 1 :]:
                each.pacer.play_sooner(dropped_s)
            del self._playing[place]
        if response in self.in_progress:
            await self._cut(response, "client_cancelled")

    async def _cut(self, response: Response, reason: CancelReason) -> None:
        """End the response in progress, and wait until its last events are posted."""
        response.cancel(reason)
        await response.done.wait()
