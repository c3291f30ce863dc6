"""Write down what the user says: one recording of a session after the other.

A recording that waits is kept, also if its item is deleted. So the recordings that wait have a bound of their own.
"""

from __future__ import annotations

from typing import Any

import trio

from omni_actors.errors import OmniError
from omni_actors.serve.api.errors import to_http_error
from omni_actors.serve.http.errors import HTTPError
from omni_actors.serve.realtime.conversation import Entry
from omni_actors.serve.realtime.input_audio import Recording
from omni_actors.serve.realtime.items import Message
from omni_actors.serve.realtime.outbox import Outbox, error_object
from omni_actors.serve.realtime.pipeline import SessionPipeline

MOST_WAITING = 64
_EVENT = "conversation.item.input_audio_transcription"


class Transcriber:
    """Transcribes the recordings of one session.

    Args:
        pipeline: hears the recordings.
        outbox: receives the events about recordings whose words the client asked for.
        max_bytes: the most bytes of recordings that wait.
    """

    def __init__(self, pipeline: SessionPipeline, outbox: Outbox, max_bytes: int) -> None:
        self._pipeline, self._outbox, self._max_bytes = pipeline, outbox, max_bytes
        self._queue, self._queued = trio.open_memory_channel[tuple[Entry, bool, dict[str, Any]]](MOST_WAITING)
        self._waiting_bytes = 0

    def check_room(self, size: int) -> None:
        """Refuse an entry with ``size`` bytes of recordings if too much waits. Raises HTTPError."""
        if (
            self._queued.statistics().current_buffer_used < MOST_WAITING
            and self._waiting_bytes + size <= self._max_bytes
        ):
            return
        raise HTTPError(429, "too many recordings wait for their transcripts", code="transcription_backlog")

    def add(self, entry: Entry, *, is_asked: bool, params: dict[str, Any]) -> None:
        """Transcribe an entry's recordings, for which there is room. is_asked: whether the client gets the words."""
        self._waiting_bytes += entry.recorded_bytes
        self._queue.send_nowait((entry, is_asked, params))

    async def run(self) -> None:
        """Transcribe until cancelled."""
        async for entry, is_asked, params in self._queued:
            size = entry.recorded_bytes
            for index, recording in list(entry.recordings.items()):
                await self._outbox.wait_room()
                try:
                    await self._transcribe(entry, index, recording, is_asked=is_asked, params=params)
                except OmniError as error:
                    entry.error = error
                    if is_asked:
                        place = {"item_id": entry.item.id, "content_index": index}
                        self._outbox.post(f"{_EVENT}.failed", **place, error=error_object(to_http_error(error)))
            self._waiting_bytes -= size
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
