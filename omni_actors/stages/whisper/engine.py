"""Speech recognition as a stage, on faster-whisper (CTranslate2), on the CPU.

Input, from the client: pieces of recordings (see ``multimodal.audio``). A chunk without audio may end the input.

Output: ``data["text"]`` is a piece of the transcript of the recording ``data["index"]``. The last output has an empty
text and ``duration_s``, the seconds of all recordings together. If the request asks for timestamps, each piece has
``data["segment"]``: its times in seconds and the measurements of the decoder, with ``words`` if their times were asked
for; and the last output has ``language``, the code of that of the last recording.

Rules
1. A step gives one segment (a phrase) of one request. Requests take turns, so a long recording does not delay a short
   one.
2. Decoding is greedy or a beam search, never sampled, so the same pieces of audio always give the same text.
3. A recording that arrives in pieces is transcribed meanwhile, in windows of 30 s (see ``windows``).
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
from omni_actors.stages.whisper.options import WhisperOptions, WhisperParams

if TYPE_CHECKING:
    from faster_whisper.transcribe import Segment

    from omni_actors.stages.whisper.windows import Transcription


class _Request:
    def __init__(self, request: base.StageRequest) -> None:
        self.open = OpenSources(request.sources)
        self.params = validated(request.params, WhisperParams)
        self.language: str | None = self.params.language
        """Of the newest recording, as far as it is known."""
        self.recordings = Recordings()
        self.transcriptions: deque[Transcription] = deque()
        """Of the recordings that have begun to arrive; the first one is the next."""
        self.index = 0
        self.paused = False

    @property
    def ready(self) -> bool:
        return not self.paused and bool(self.transcriptions) and self.transcriptions[0].ready


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
            self._transcription(request, recording).complete(recording)
        if (arriving := request.recordings.arriving) is not None:
            self._transcription(request, arriving).take(arriving)

    def _transcription(self, request: _Request, recording: Recording) -> Transcription:
        from omni_actors.stages.whisper.windows import Transcription

        if not request.transcriptions or request.transcriptions[-1].index != recording.index:
            options = self._decoding(request.params.language, request.params)
            request.transcriptions.append(Transcription(self._model, recording.index, options))
        return request.transcriptions[-1]

    def step(self) -> Iterator[base.StageOutput | base.StageFailure]:
        """Transcribe the next segment of the request that has waited longest."""
        request_id = next(request_id for request_id, request in self._requests.items() if request.ready)
        request = self._requests.pop(request_id)
        current = request.transcriptions[0]
        request.index = current.index
        try:
            with request_work("audio"):
                segment = current.next_segment()
        except base.InvalidRequest as error:
            yield base.StageFailure(request_id, error)
            return
        request.language = current.language
        if current.done:
            request.transcriptions.popleft()
        if segment is None and not request.transcriptions and not request.open:
            data: dict[str, Any] = {"text": "", "index": request.index, "duration_s": request.recordings.duration_s}
            if request.params.timestamps is not None:
                data["language"] = request.language
            yield base.StageOutput(request_id, data=data, last=True)
            return
        self._requests[request_id] = request  # at the end of the queue
        if segment is not None:
            text = segment.text.lstrip() if current.at_start else segment.text
            current.at_start = False
            data = {"text": text, "index": request.index}
            if request.params.timestamps is not None:
                data["segment"] = _described(segment, current)
            yield base.StageOutput(request_id, data=data)

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


def _described(segment: Segment, transcription: Transcription) -> dict[str, Any]:
    """Return the times of its newest segment in seconds, and the measurements of its decoding."""
    names = ("tokens", "temperature", "avg_logprob", "compression_ratio", "no_speech_prob")
    found = transcription.times(segment) | {name: getattr(segment, name) for name in names}
    if segment.words is not None:
        found["words"] = [{"word": each.word, **transcription.times(each)} for each in segment.words]
    return found
