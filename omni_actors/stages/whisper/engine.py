"""Speech recognition as a stage, on faster-whisper (CTranslate2), on the CPU.

Input, from the client: pieces of recordings (see ``multimodal.audio``). A chunk without audio may end the input.

Output: ``data["text"]`` is a piece of the transcript of the recording ``data["index"]``. The last output has an empty
text and ``duration_s``, the seconds of all recordings together. If the request asks for timestamps, each piece has
``data["segment"]``: its times in seconds and the measurements of the decoder, with ``words`` if their times were asked
for; and the last output has ``language``, the code of that of the last recording.

Rules
1. A step decodes one window of one request, and puts out its segments (phrases). Requests take turns, so a long
   recording does not delay a short one.
2. Decoding is greedy or a beam search, never sampled, so the same pieces of audio give the same text on one machine.
3. A recording that arrives in pieces is transcribed meanwhile, in windows of 30 s (see ``windows``).
4. The decisions of a window's first output are the outputs of the window and the place behind it (``journal``). So a
   new incarnation decodes no window again of which an output has arrived anywhere. Windows without text have no output:
   those behind the last output are decoded again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from omni_actors.stages import base
from omni_actors.stages.engine import PausableEngine
from omni_actors.stages.multimodal.audio import Recording, Recordings, audio_refusal
from omni_actors.stages.refusal import request_work, validated
from omni_actors.stages.sources import OpenSources
from omni_actors.stages.whisper import journal
from omni_actors.stages.whisper.options import WhisperOptions, WhisperParams

if TYPE_CHECKING:
    from faster_whisper.transcribe import Segment

    from omni_actors.stages.whisper.windows import Transcription


class _Request:
    def __init__(self, request: base.StageRequest) -> None:
        self.open = OpenSources(request.sources)
        self.params = validated(request.params, WhisperParams)
        self.recordings = Recordings()
        self.transcriptions: deque[Transcription] = deque()
        """The transcriptions of the recordings that have begun to arrive; the first one is the next."""
        self.decided = deque(journal.windows(request.journal))
        """The windows of the journal whose outputs are to be put out again."""
        self.place = self.decided[-1].place if self.decided else None
        """Where the request goes on behind them."""
        self.paused = False

    @property
    def ready(self) -> bool:
        if self.paused or self.decided:
            return not self.paused
        return bool(self.transcriptions) and self.transcriptions[0].ready

    def is_transcribed(self, recording: Recording) -> bool:
        """Return whether an earlier incarnation had transcribed all of the recording."""
        return self.place is not None and recording.index < self.place.index


class WhisperEngine(PausableEngine[_Request]):
    """Transcribes recordings. ``context.model``: a directory of a Whisper model in CTranslate2's format."""

    def __init__(self, context: base.StageContext) -> None:
        super().__init__()
        directory = context.model_directory
        options = msgspec.convert(context.options, WhisperOptions)
        # Without this file faster-whisper would try to download one.
        if not (directory / "tokenizer.json").is_file():
            raise FileNotFoundError(f"{directory} has no tokenizer.json")
        context.report("loading the speech recognizer")
        from omni_actors.stages.whisper.windows import SAMPLE_RATE, Recognizer

        self._model = Recognizer(
            str(directory),
            device="cpu",
            compute_type=options.compute_type,
            cpu_threads=context.threads,
            local_files_only=True,
        )
        self._beam_size = options.beam_size
        context.report("warming up")
        segments, _ = self._model.transcribe(np.zeros(SAMPLE_RATE, np.float32), **self._decoding("en", WhisperParams()))
        list(segments)

    def _new_request(self, request: base.StageRequest) -> _Request:
        new = _Request(request)
        known, params = self._model.supported_languages, new.params
        if params.language is not None and params.language not in known:
            message = f"the model has no language {params.language!r}; accepted: {', '.join(known)}"
            raise base.InvalidRequest(message, param="language")
        if params.task == "translate" and not self._model.model.is_multilingual:
            message = "task: the model knows English only, so it cannot translate; accepted: 'transcribe'"
            raise base.InvalidRequest(message, param="task")
        return new

    def _take(self, request: _Request, chunk: base.Chunk) -> None:
        if "audio" in chunk.tensors:
            request.recordings.feed(chunk.tensors["audio"], chunk.data)
        request.open.update(chunk)
        if not request.open:
            request.recordings.end_recording()
            if not request.recordings.duration_s:
                raise audio_refusal("there is no audio")
        with request_work("audio"):
            self._transcribe_arrived(request)

    def _transcribe_arrived(self, request: _Request) -> None:
        """Pass on the sound that has arrived."""
        for recording in request.recordings.take_complete():
            if not request.is_transcribed(recording):
                self._transcription(request, recording).complete(recording)
        if (arriving := request.recordings.arriving) is not None:
            if request.is_transcribed(arriving):
                arriving.take_pieces()
            else:
                self._transcription(request, arriving).take(arriving)

    def _transcription(self, request: _Request, recording: Recording) -> Transcription:
        from omni_actors.stages.whisper.windows import Transcription

        if not request.transcriptions or request.transcriptions[-1].index != recording.index:
            options = self._decoding(request.params.language, request.params)
            place = request.place if request.place is not None and request.place.index == recording.index else None
            request.transcriptions.append(Transcription(self._model, recording.index, options, place))
        return request.transcriptions[-1]

    def step(self) -> Iterator[base.StageOutput | base.StageFailure]:
        """Decode the next window of the request that has waited longest, or put out one of its journal."""
        request_id = next(request_id for request_id, request in self._requests.items() if request.ready)
        request = self._requests.pop(request_id)
        if request.decided:
            self._requests[request_id] = request
            yield from _outputs(request_id, request.decided.popleft())
            return
        current = request.transcriptions[0]
        try:
            with request_work("audio"):
                segments = current.next_window()
        except base.InvalidRequest as error:
            yield base.StageFailure(request_id, error)
            return
        if segments is None:
            request.transcriptions.popleft()
            if not request.transcriptions and not request.open:
                yield _last_output(request_id, request, current)
                return
        self._requests[request_id] = request  # at the end of the queue
        if segments:
            found = [_found(segment, current, request.params) for segment in segments]
            yield from _outputs(request_id, journal.Window(found, current.place))

    def close(self) -> None:
        super().close()
        self._model.model.unload_model()
        del self._model

    def _decoding(self, language: str | None, params: WhisperParams) -> dict[str, Any]:
        """Return the options of a transcription. language None: the model detects it."""
        return {
            "language": language,
            "task": params.task,
            "initial_prompt": params.initial_prompt or None,
            "word_timestamps": params.timestamps == "word",
            "beam_size": self._beam_size,
            "temperature": 0.0,  # one value only: faster-whisper then never retries by sampling
            "condition_on_previous_text": False,
        }


def _outputs(request_id: base.RequestId, window: journal.Window) -> Iterator[base.StageOutput]:
    """Yield the outputs of a window. Only the first one has decisions."""
    for n, data in enumerate(window.outputs):
        yield base.StageOutput(request_id, data=data, decisions=() if n else journal.decisions(window))


def _last_output(request_id: base.RequestId, request: _Request, last: Transcription) -> base.StageOutput:
    """Return the output that ends a request. last: the transcription of the last recording."""
    data: dict[str, Any] = {"text": "", "index": last.index, "duration_s": request.recordings.duration_s}
    if request.params.timestamps is not None:
        data["language"] = last.language
    end = journal.Window([], last.place)
    return base.StageOutput(request_id, data=data, last=True, decisions=journal.decisions(end))


def _found(segment: Segment, transcription: Transcription, params: WhisperParams) -> dict[str, Any]:
    """Return the data of the output of a segment of the newest window."""
    text = segment.text.lstrip() if transcription.at_start else segment.text
    transcription.at_start = False
    data: dict[str, Any] = {"text": text, "index": transcription.index}
    if params.timestamps is not None:
        data["segment"] = _described(segment, transcription)
    return data


def _described(segment: Segment, transcription: Transcription) -> dict[str, Any]:
    """Return the times in seconds of a segment of the newest window, and the measurements of its decoding."""
    names = ("tokens", "temperature", "avg_logprob", "compression_ratio", "no_speech_prob")
    found = transcription.times(segment) | {name: getattr(segment, name) for name in names}
    if segment.words is not None:
        found["words"] = [{"word": each.word, **transcription.times(each)} for each in segment.words]
    return found
