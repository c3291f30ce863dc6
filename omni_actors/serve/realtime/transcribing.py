"""Write down what the user says: one recording of a session after the other."""

from __future__ import annotations

from typing import Any

import trio

from omni_actors.errors import OmniError
from omni_actors.serve.api.errors import to_http_error
from omni_actors.serve.realtime.conversation import Entry
from omni_actors.serve.realtime.input_audio import Recording
from omni_actors.serve.realtime.items import Message
from omni_actors.serve.realtime.outbox import Outbox, error_object
from omni_actors.serve.realtime.pipeline import SessionPipeline

_EVENT = "conversation.item.input_audio_transcription"


class Transcriber:
    """Transcribes the recordings of one session. Its queue has at most the items of the conversation.

    Args:
        pipeline: hears the recordings.
        outbox: receives the events about recordings whose words the client asked for.
        most: the most recordings that wait.
    """

    def __init__(self, pipeline: SessionPipeline, outbox: Outbox, most: int) -> None:
        self._pipeline, self._outbox = pipeline, outbox
        self._queue, self._queued = trio.open_memory_channel[tuple[Entry, bool, dict[str, Any]]](most)

    def add(self, entry: Entry, *, is_asked: bool, params: dict[str, Any]) -> None:
        """Transcribe an entry's recordings. is_asked: whether the client receives the words. Raises trio.WouldBlock."""
        self._queue.send_nowait((entry, is_asked, params))

    async def run(self) -> None:
        """Transcribe until cancelled."""
        async for entry, is_asked, params in self._queued:
            for index, recording in list(entry.recordings.items()):
                await self._outbox.wait_room()
                try:
                    await self._transcribe(entry, index, recording, is_asked=is_asked, params=params)
                except OmniError as error:
                    entry.error = error
                    if is_asked:
                        place = {"item_id": entry.item.id, "content_index": index}
                        self._outbox.post(f"{_EVENT}.failed", **place, error=error_object(to_http_error(error)))
            entry.words_known.set()

    async def _transcribe(
        self, entry: Entry, index: int, recording: Recording, *, is_asked: bool, params: dict[str, Any]
    ) -> None:
        """Set the transcript of one recording. Raises OmniError."""
        place = {"item_id": entry.item.id, "content_index": index}
        words: list[str] = []
        async for output in self._pipeline.transcribe(recording.clip(), params):
            if isinstance(output.delta, str):
                words.append(output.delta)
                if is_asked:
                    self._outbox.post(f"{_EVENT}.delta", **place, delta=output.delta)
                    await self._outbox.wait_room()
        assert isinstance(entry.item, Message)
        transcript = entry.item.content[index].transcript = "".join(words).strip()
        if is_asked:
            usage = {"type": "duration", "seconds": round(recording.duration_s, 3)}
            self._outbox.post(f"{_EVENT}.completed", **place, transcript=transcript, usage=usage)
