"""Write down what the user says: one recording of a session after the other.

Rules
1. A recording that waits is kept, also if its item is deleted. So the recordings that wait have a bound of their own.
2. A transcript that failed is not final, unless the same request would fail again: ``may_succeed`` tells, and the next
   response that needs the words has them written down again.
"""

from __future__ import annotations

import trio

from omni_actors.errors import OmniError
from omni_actors.serve.api.errors import to_http_error
from omni_actors.serve.http.errors import HTTPError
from omni_actors.serve.realtime.config import Transcription
from omni_actors.serve.realtime.conversation import Entry
from omni_actors.serve.realtime.input_audio import Recording
from omni_actors.serve.realtime.items import Message
from omni_actors.serve.realtime.outbox import Outbox, error_object
from omni_actors.serve.realtime.pipeline import SessionPipeline

MOST_WAITING = 64
_EVENT = "conversation.item.input_audio_transcription"


def may_succeed(error: OmniError) -> bool:
    """Return whether the request that failed may succeed if it is made again: after 429 and from 500 on."""
    status = to_http_error(error).status
    return status == 429 or status >= 500


class Transcriber:
    """Transcribes the recordings of one session.

    Args:
        pipeline: hears the recordings.
        outbox: receives the events about recordings whose words the client asked for.
        max_bytes: the most bytes of recordings that wait.
    """

    def __init__(self, pipeline: SessionPipeline, outbox: Outbox, max_bytes: int) -> None:
        self._pipeline, self._outbox, self._max_bytes = pipeline, outbox, max_bytes
        self._queue, self._queued = trio.open_memory_channel[tuple[Entry, Transcription | None]](MOST_WAITING)
        self._waiting_bytes = 0

    def has_room(self, size: int) -> bool:
        """Return whether an entry with ``size`` bytes of recordings may wait. One without recordings does not wait."""
        if not size:
            return True
        is_short = self._queued.statistics().current_buffer_used < MOST_WAITING
        return is_short and self._waiting_bytes + size <= self._max_bytes

    def check_room(self, size: int) -> None:
        """Refuse an entry with ``size`` bytes of recordings if too much waits. Raises HTTPError."""
        if not self.has_room(size):
            raise HTTPError(429, "too many recordings wait for their transcripts", code="transcription_backlog")

    def add(self, entry: Entry, asked: Transcription | None) -> None:
        """Transcribe the recordings of an entry that have no transcript. There is room for them.

        Args:
            entry: the entry. Its words count as not known until then.
            asked: the client's settings; None: the client does not get the words.
        """
        entry.expect_words()
        self._waiting_bytes += entry.recorded_bytes
        self._queue.send_nowait((entry, asked))

    async def run(self) -> None:
        """Transcribe until cancelled."""
        async for entry, asked in self._queued:
            size = entry.recorded_bytes
            for index, recording in entry.untranscribed():
                await self._outbox.wait_room()
                try:
                    await self._transcribe(entry, index, recording, asked)
                except OmniError as error:
                    entry.error = error.with_traceback(None)  # the ended request keeps the error, and not this session
                    if asked is not None:
                        place = {"item_id": entry.item.id, "content_index": index}
                        self._outbox.post(f"{_EVENT}.failed", **place, error=error_object(to_http_error(error)))
            self._waiting_bytes -= size
            entry.words_known.set()

    async def _transcribe(self, entry: Entry, index: int, recording: Recording, asked: Transcription | None) -> None:
        """Set the transcript of one recording. Raises OmniError."""
        place = {"item_id": entry.item.id, "content_index": index}
        words: list[str] = []
        generation = self._pipeline.transcribe(recording.clip(), asked)
        try:
            async for output in generation:
                if isinstance(output.delta, str):
                    words.append(output.delta)
                    if asked is not None:
                        self._outbox.post(f"{_EVENT}.delta", **place, delta=output.delta)
                        await self._outbox.wait_room()
        finally:
            generation.abort()
        assert isinstance(entry.item, Message)
        transcript = entry.item.content[index].transcript = "".join(words).strip()
        entry.measure()
        if asked is not None:
            usage = {"type": "duration", "seconds": round(recording.duration_s, 3)}
            self._outbox.post(f"{_EVENT}.completed", **place, transcript=transcript, usage=usage)
