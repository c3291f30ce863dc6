"""The events that tell a client about one response, in the order of the protocol.

::

    response.created
      response.output_item.added, conversation.item.added         for each item: a message, or a call of a function
        response.content_part.added                               of a message
          response.output_text.delta*                             written
          response.output_audio_transcript.delta*, response.output_audio.delta*    spoken
          response.function_call_arguments.delta*                 of a call
        the same with "done", and response.content_part.done
      conversation.item.done, response.output_item.done
    response.done

Rules
1. A message begins with its first text or sound, a call with its name.
2. Every item that was begun is done before the response, whatever ends it. It is "incomplete" if the response is.
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from omni_actors.outputs import AudioChunk
from omni_actors.serve.media.base64_data import to_base64
from omni_actors.serve.realtime.conversation import Conversation, Entry
from omni_actors.serve.realtime.items import FunctionCall, Item, Message, Part, Status, new_id, wire
from omni_actors.serve.realtime.outbox import Outbox


class ResponseEvents:
    """Posts the events of one response.

    Args:
        outbox: receives the events.
        conversation: receives the items; None if the response is out of the conversation.
        head: the fields of the response object that do not change.
        is_spoken: whether the answer is spoken.
        has_word_timing: whether the events of its sound say which words have been heard by then.
    """

    def __init__(
        self,
        outbox: Outbox,
        conversation: Conversation | None,
        head: Mapping[str, Any],
        *,
        is_spoken: bool,
        has_word_timing: bool = False,
    ) -> None:
        self.id = new_id("resp")
        self._has_word_timing = has_word_timing
        self._outbox, self._conversation, self._head, self._is_spoken = outbox, conversation, head, is_spoken
        self.output: list[Entry] = []
        self.message: Entry | None = None
        """The message, once it has begun."""
        self._call: Entry | None = None
        """The call whose arguments are being written."""

    def begin(self) -> None:
        self._outbox.post("response.created", response=self._response("in_progress", None, None))

    def text(self, delta: str) -> None:
        """Add text, or words of the spoken answer."""
        entry, part = self._begun_message()
        if self._is_spoken:
            entry.spoken.add_text(delta)
            part.transcript = (part.transcript or "") + delta
        else:
            part.text = (part.text or "") + delta
        entry.grow(delta)
        name = "output_audio_transcript" if self._is_spoken else "output_text"
        self._post(f"{name}.delta", entry, content_index=0, delta=delta)

    def computed(self, chunk: AudioChunk, sentence: str | None) -> None:
        """Note sound that may leave later. sentence: the text of the sentence that begins with it, if it is known."""
        self._begun_message()[0].spoken.add_sound(chunk.samples, chunk.sample_rate, sentence)

    def all_computed(self) -> None:
        """Note that no more text or sound is computed. So the words of an answer fill its sound."""
        if self.message is not None:
            self.message.spoken.finish()

    def sound(self, data: bytes, bytes_per_s: int) -> None:
        """Send sound of the spoken answer, in its format."""
        entry, _ = self._begun_message()
        entry.sent_ms += Fraction(1000 * len(data), bytes_per_s)
        timing = {"transcript_end": len(entry.spoken.heard(float(entry.sent_ms)))} if self._has_word_timing else {}
        self._post("output_audio.delta", entry, content_index=0, delta=to_base64(data), **timing)

    def call(self, found: Mapping[str, Any]) -> None:
        """Add a call of a function, or more of its arguments. found: as the chat API streams calls."""
        function = found["function"]
        if "id" in found:
            begun = FunctionCall(name=function["name"], arguments="", call_id=found["id"], status="in_progress")
            self._call = self._add(begun)
        assert self._call is not None
        item = self._call.item
        assert isinstance(item, FunctionCall)
        item.arguments += function["arguments"]
        self._call.grow(function["arguments"])
        self._post("function_call_arguments.delta", self._call, call_id=item.call_id, delta=function["arguments"])

    def end_call(self, status: Status = "completed") -> None:
        """End the call whose arguments are being written, if there is one."""
        entry, self._call = self._call, None
        if entry is None:
            return
        item = entry.item
        assert isinstance(item, FunctionCall)
        fields = {"call_id": item.call_id, "name": item.name, "arguments": item.arguments}
        self._post("function_call_arguments.done", entry, **fields)
        self._done(entry, status)

    def end(self, status: str, details: Mapping[str, Any] | None, usage: Mapping[str, int] | None) -> None:
        """End the response and what it has begun.

        A spoken answer that was cut or has failed keeps the words whose sound was sent.
        """
        item_status: Status = "completed" if status == "completed" else "incomplete"
        self.end_call(item_status)
        if self.message is not None:
            if self._is_spoken and status in ("cancelled", "failed"):
                self.message.keep_heard(float(self.message.sent_ms))
            self._end_message(self.message, item_status)
        self._outbox.post("response.done", response=self._response(status, details, usage))

    def _end_message(self, entry: Entry, status: Status) -> None:
        _, part = self._begun_message()
        at = {"content_index": 0}
        if self._is_spoken:
            self._post("output_audio.done", entry, **at)
            self._post("output_audio_transcript.done", entry, **at, transcript=part.transcript or "")
        else:
            self._post("output_text.done", entry, **at, text=part.text or "")
        self._post("content_part.done", entry, **at, part=self._part(part.words))
        self._done(entry, status)

    def _begun_message(self) -> tuple[Entry, Part]:
        if self.message is None:
            part = Part("output_audio", transcript="") if self._is_spoken else Part("output_text", text="")
            begun = Message(role="assistant", content=[], status="in_progress")
            self.message = self._add(begun)
            begun.content.append(part)
            self._post("content_part.added", self.message, content_index=0, part=self._part(""))
        item = self.message.item
        assert isinstance(item, Message)
        return self.message, item.content[0]

    def _part(self, words: str) -> dict[str, str]:
        return {"type": "audio", "transcript": words} if self._is_spoken else {"type": "text", "text": words}

    def _add(self, item: Item) -> Entry:
        entry = Entry(item)
        self.output.append(entry)
        self._outbox.post("response.output_item.added", **self._place(entry), item=wire(item))
        if self._conversation is not None:
            before = self._conversation.insert(entry)
            self._outbox.post("conversation.item.added", previous_item_id=before, item=wire(item))
        return entry

    def _done(self, entry: Entry, status: Status) -> None:
        entry.item.status = status
        if self._conversation is not None and entry in self._conversation.entries:  # the client may have deleted it
            before = self._conversation.before(entry)
            self._outbox.post("conversation.item.done", previous_item_id=before, item=wire(entry.item))
        self._outbox.post("response.output_item.done", **self._place(entry), item=wire(entry.item))

    def _post(self, event: str, entry: Entry, /, **fields: Any) -> None:
        self._outbox.post(f"response.{event}", **self._place(entry), item_id=entry.item.id, **fields)

    def _place(self, entry: Entry) -> dict[str, Any]:
        return {"response_id": self.id, "output_index": self.output.index(entry)}

    def _response(
        self, status: str, details: Mapping[str, Any] | None, usage: Mapping[str, int] | None
    ) -> dict[str, Any]:
        output = [] if status == "in_progress" else [wire(entry.item) for entry in self.output]
        return {
            "object": "realtime.response",
            "id": self.id,
            "status": status,
            "status_details": details,
            "output": output,
            "usage": usage,
            **self._head,
        }
