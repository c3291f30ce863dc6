"""The turns of a session whose user does not mark them: finds them in the sound, and acts on them.

Rules
1. ``speech_started`` is posted when speech is certain to be a turn. So a backchannel that is ignored is not announced,
   and clients go on playing.
2. A turn's sound leaves the buffer when the turn ends. Sound before a turn is dropped when the turn starts, and silence
   that is older than ``KEPT_S`` as it ages.
3. A turn that fills the buffer ends there.
4. Detectors run in threads, at most ``_THREADS`` at a time for all sessions: some pauses take 40 ms. A thread takes at
   most a second of sound at a time, so that a session which sends minutes at once does not delay the others.
5. A turn that the conversation refuses is dropped, and answered with an ``error`` event. The sound after it counts.
6. A thread uses the detector only while the task of ``hear`` waits for it. Other tasks leave the detector alone.
7. When the settings change, a new ``TurnTaking`` judges what the buffer holds, so speech in progress keeps its begin. A
   turn that was announced keeps its item (``TurnItem``). It is a turn also if the new settings would ignore it as a
   backchannel. If they do not find it within ``_FOUND_WITHIN_MS``, it is stopped and makes no item. The wait for
   speech goes on.
"""

from __future__ import annotations

from typing import Protocol

import trio

from omni_actors.installed import is_importable
from omni_actors.serve.http.errors import HTTPError, bad_request
from omni_actors.serve.realtime.config import AudioFormat
from omni_actors.serve.realtime.input_audio import InputAudio
from omni_actors.serve.realtime.items import new_id
from omni_actors.serve.realtime.outbox import Outbox
from omni_actors.serve.realtime.sound import SoundDecoder, bytes_per_s
from omni_actors.stages import assets
from omni_actors.turns import (
    SAMPLE_RATE,
    BargeIn,
    Decision,
    Detector,
    Event,
    IdleTimeout,
    SpeechStarted,
    SpeechStopped,
    TurnDetection,
    open_detector,
)

KEPT_S = 45.0
"""How much sound without speech is kept. It exceeds the longest idle timeout."""
_FOUND_WITHIN_MS = 320
"""How much sound, from where its speech began, new settings may need to find a turn that was announced: ten windows of
the detector."""
_THREADS = trio.CapacityLimiter(2)


class TurnSession(Protocol):
    """What turn taking asks of its session."""

    def is_answering(self) -> bool:
        """Return whether an answer is in progress: it is computed, or its sound has not left."""

    def is_playing(self) -> bool:
        """Return whether the client plays an answer, or waits for one."""

    def is_heard(self, since_s: float) -> bool:
        """Return whether the client plays an answer, and has played it for more than ``since_s``."""

    def unplayed_s(self) -> float:
        """Return how long the client will play answers."""

    async def interrupt(self) -> None:
        """Cut the answer, and keep of it what was heard."""

    def commit_turn(self, until_ms: float | None, item_id: str) -> None:
        """Make an item of the sound up to a position. Raises HTTPError."""

    def respond_to_turn(self, *, is_spoken: bool) -> None:
        """Begin a response, unless one is in progress or the pipeline makes none. Raises HTTPError.

        is_spoken: whether the user spoke.
        """


class TurnItem:
    """The item of the turn in progress, or of the next one. It outlives changes of the turn detection.

    Attributes:
        id: of the item.
        speech_ms: where in the session's sound its speech begins, once ``speech_started`` was posted for it.
    """

    def __init__(self) -> None:
        self.id = new_id("item")
        self.speech_ms: float | None = None

    @property
    def is_announced(self) -> bool:
        """Whether ``speech_started`` was posted for it."""
        return self.speech_ms is not None

    def take(self) -> str:
        """Return the identifier: the turn has ended. The item of the next turn has a new one."""
        id, self.id, self.speech_ms = self.id, new_id("item"), None
        return id


def can_detect() -> bool:
    """Return whether the libraries and the model of ``server_vad`` are installed."""
    return assets.is_ready("silero-vad") and is_importable("onnxruntime")


async def open_turn_taking(
    settings: TurnDetection,
    session: TurnSession,
    sound: InputAudio,
    item: TurnItem,
    *,
    format: AudioFormat,
    outbox: Outbox,
    before: TurnTaking | None,
) -> TurnTaking:
    """Return the turn taking of a session. Its stream begins with what the buffer holds, see ``hear_buffer``.

    Args:
        settings: of the detector.
        session: acts on the turns.
        sound: the buffer.
        item: of the session's turns.
        format: of the buffer.
        outbox: receives the events.
        before: what followed the sound until now, if anything did: its wait for speech goes on.

    The models are loaded in a thread. Raises HTTPError: one is not there.
    """
    try:
        detector = await trio.to_thread.run_sync(open_detector, settings, limiter=_THREADS)
    except assets.ModelNotFound as error:
        place = "session.audio.input.turn_detection"
        raise bad_request(f"{place}: {error}", place, "unsupported_parameter") from error
    turns = TurnTaking(settings, detector, session, sound=sound, item=item, format=format, outbox=outbox)
    if before is not None:
        turns.continue_wait(before)
    return turns


class TurnTaking:
    """Follows the sound of one session in one format. ``hear`` gets all of it."""

    def __init__(
        self,
        settings: TurnDetection,
        detector: Detector,
        session: TurnSession,
        sound: InputAudio,
        item: TurnItem,
        format: AudioFormat,
        outbox: Outbox,
    ) -> None:
        self._settings, self._detector, self._session = settings, detector, session
        self._sound, self._item, self._format, self._outbox = sound, item, format, outbox
        self._begins_ms = sound.begins_ms
        """The position in the session's sound at which the detector's stream begins."""
        self._decoder = SoundDecoder(format, SAMPLE_RATE)
        self._barge_in = BargeIn(
            interrupts=settings.interrupt_response, ignores_backchannels=settings.ignore_backchannels
        )
        self._held: SpeechStarted | None = None
        """A start of speech that is not announced yet (rule 1)."""
        self._expect_from_ms: float | None = None
        """Where in the detector's stream the wait for speech begins, until the detector knows (rule 6)."""

    def continue_wait(self, before: TurnTaking) -> None:
        """Go on with the wait for speech that has begun before the settings changed."""
        from_ms = before._detector.waits_from_ms if before._expect_from_ms is None else before._expect_from_ms
        if from_ms is not None:
            self._expect_from_ms = before._begins_ms + from_ms - self._begins_ms

    async def hear_buffer(self) -> None:
        """Judge what the buffer held when this was made. Call it once, before ``hear``."""
        data, size = self._sound.content(), bytes_per_s(self._format)
        for at in range(0, len(data), size):
            await self._judge(data[at : at + size])
        self._stop_lost_turn()

    async def hear(self, data: bytes) -> None:
        """Take the next sound of the user, and do what it asks for. Raises HTTPError: the buffer is full."""
        size = bytes_per_s(self._format)
        for at in range(0, len(data), size):
            await self._hear(data[at : at + size])

    async def _hear(self, data: bytes) -> None:
        if self._detector.is_speaking and not self._sound.has_room(len(data), self._format):
            await self._stop(SpeechStopped(self._detector.position_ms, self._detector.position_ms))
            self._detector.reset()
        self._sound.append(data, self._format)
        await self._judge(data)
        self._stop_lost_turn()

    async def _judge(self, data: bytes) -> None:
        """Have the detector judge sound that the buffer has got, and do what it asks for."""
        if self._expect_from_ms is not None:
            self._detector.expect_speech(round(self._expect_from_ms))
            self._expect_from_ms = None
        for event in await trio.to_thread.run_sync(self._detect, data, limiter=_THREADS):
            await self._follow(event)
        if self._barge_in.advanced(self._detector.spoken_until_ms) is Decision.CUT:
            await self._cut()
        if not self._detector.is_speaking:
            end_ms = self._begins_ms + self._detector.position_ms
            self._sound.forget(end_ms - 1000 * KEPT_S, self._format)

    def _stop_lost_turn(self) -> None:
        """Stop a turn that was announced and that new settings do not find (rule 7)."""
        if self._detector.is_speaking or self._item.speech_ms is None:
            return
        end_ms = self._begins_ms + self._detector.position_ms
        if end_ms >= self._item.speech_ms + _FOUND_WITHIN_MS:
            self._post_stopped(end_ms)

    def reset(self) -> None:
        """Forget the turn in progress: the client took or dropped its sound. The session takes the item."""
        self._detector.reset()
        self._barge_in.reset()
        self._decoder.forget_rest()
        self._held = None

    def expect_speech(self, after_s: float) -> None:
        """Wait for the user to speak, from when an answer will have been played: in ``after_s`` seconds.

        The wait counts from the end of the sound that has arrived. It begins with the next sound.
        """
        self._expect_from_ms = self._sound.end_ms(self._format) - self._begins_ms + 1000 * after_s

    def _detect(self, data: bytes) -> list[Event]:
        return self._detector.feed(self._decoder.push(data))

    async def _follow(self, event: Event) -> None:
        match event:
            case SpeechStarted():
                if not self._item.is_announced:  # else the buffer begins where the turn does (rule 7)
                    self._sound.forget(self._begins_ms + event.at_ms, self._format)
                found_after_s = (self._detector.position_ms - event.speech_ms) / 1000
                playing, heard = self._session.is_playing(), self._session.is_heard(found_after_s)
                self._held = event
                if self._barge_in.started(event, playing=playing, heard=heard) is Decision.CUT:
                    await self._cut()
                elif not self._barge_in.is_undecided:
                    self._announce()
            case SpeechStopped():
                await self._stop(event)
            case IdleTimeout() if not self._session.is_answering():  # else the wait begins again after the answer
                self._time_out(event)

    async def _stop(self, event: SpeechStopped) -> None:
        answering = self._settings.create_response and self._session.is_answering()
        for decision in self._barge_in.stopped(event, answering=answering):
            if decision is Decision.CUT:
                await self._cut()
            elif decision is Decision.BACKCHANNEL and not self._item.is_announced:
                self._held = None
                self._sound.forget(self._begins_ms + event.at_ms, self._format)
                if not self._session.is_answering():  # else the wait begins again after the answer
                    self.expect_speech(self._session.unplayed_s())
            else:
                self._held = None
                self._end_turn(self._begins_ms + event.at_ms)

    def _announce(self) -> None:
        event, self._held = self._held, None
        if self._item.is_announced:
            return
        assert event is not None
        self._item.speech_ms = self._begins_ms + event.speech_ms
        start_ms = round(self._begins_ms + event.at_ms)
        self._outbox.post("input_audio_buffer.speech_started", audio_start_ms=start_ms, item_id=self._item.id)

    async def _cut(self) -> None:
        self._announce()
        await self._session.interrupt()

    def _end_turn(self, end_ms: float) -> None:
        self._commit(end_ms, self._post_stopped(end_ms), is_spoken=True)

    def _post_stopped(self, end_ms: float) -> str:
        """Announce the end of the turn. Return the identifier of its item."""
        id = self._item.take()
        self._outbox.post("input_audio_buffer.speech_stopped", audio_end_ms=round(end_ms), item_id=id)
        return id

    def _time_out(self, event: IdleTimeout) -> None:
        id = self._item.take()
        start_ms, end_ms = (round(self._begins_ms + at_ms) for at_ms in (event.start_ms, event.at_ms))
        self._sound.forget(start_ms, self._format)
        place = {"audio_start_ms": start_ms, "audio_end_ms": end_ms}
        self._outbox.post("input_audio_buffer.timeout_triggered", **place, item_id=id)
        self._commit(end_ms, id, is_spoken=False)

    def _commit(self, end_ms: float, id: str, *, is_spoken: bool) -> None:
        try:
            self._session.commit_turn(end_ms, id)
            if self._settings.create_response:
                self._session.respond_to_turn(is_spoken=is_spoken)
        except HTTPError as error:
            self._outbox.post_error(error)
            self._sound.forget(end_ms, self._format)
