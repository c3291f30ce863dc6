"""hibari's acoustic network as a stage: text to spectral features, a sentence at a time.

Input, from the client or from a language model: ``data["text"]``, a whole script or a piece of one. A client's script
has at most ``LONGEST_SCRIPT`` characters, as all of it comes at once; a language model's context bounds its own.

Output, for sentence ``k`` of F frames (80 a second), in chunks of ``chunk_frames`` frames from frame ``start``:
``data``: sentence k, start, frames F and, in the sentence's first chunk, its text. ``tensors``, float32: lh, theta, ln,
lr, phi, each (601, f), C-contiguous, for frames [start, start + f); in the first chunk also f0, (F,), in Hz.

A sentence in which there is nothing to pronounce (":-)") is left out. A client's script without any other is a failed
request; a language model's answer without any other ends without sound, since its text is the answer. A sentence with
too many phonemes counts as several; the first of them brings the text. The last chunk of the last sentence is the
request's last output, or an empty one where nothing is left to say.

A sentence that ends as sentences do is computed before the text after it shows that it is complete, a step of the
language model later; where it goes on after all ("3.", "14"), that was for nothing. What is put out is the same, and
what is due goes first; what becomes due meanwhile waits for a sentence, as it would behind any other.

hibari reads the text (see ``reading``); the network is the one in its package.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import chain, repeat
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec
import numpy as np

from omni_actors.stages.base import (
    CLIENT,
    Chunk,
    InvalidRequest,
    RequestId,
    StageContext,
    StageFailure,
    StageOutput,
    StageRequest,
)
from omni_actors.stages.hibari.options import AcousticOptions, AcousticParams
from omni_actors.stages.hibari.reading import Reading
from omni_actors.stages.hibari.text import SentenceReader
from omni_actors.stages.pausing import FlaggedPausing
from omni_actors.stages.refusal import validated
from omni_actors.stages.sources import OpenSources

if TYPE_CHECKING:
    from hibari import Hibari

_Floats: TypeAlias = "np.ndarray[Any, np.dtype[np.float32]]"

__all__ = ["LONGEST_SCRIPT", "AcousticEngine"]

LONGEST_SCRIPT = 16_384
"""Characters: about 18 minutes of speech."""

_UNSPEAKABLE = "nothing in this text can be spoken: the voice reads English words, numbers and common symbols"
_WARM_UP = "This warms up the voice, Xylander."  # with a word that no lexicon has, so that every part of it is loaded


class _Request:
    def __init__(self, request: StageRequest, reader: SentenceReader) -> None:
        self.open = OpenSources(request.sources)
        self.speed = validated(request.params, AcousticParams).speed
        self.reader = reader
        self.is_script = request.sources == (CLIENT,)
        """The client's text is all there is to speak."""
        self.blank = self.is_script
        """It is a script, and so far there is only white space in it."""
        self.script = 0
        """Characters that the client has sent."""
        self.sentences: deque[str] = deque()
        self.phrases: deque[tuple[str, str]] = deque()
        """(phonemes, text): the next sentence, made ready."""
        self.spoken = 0
        self.paused = False
        self.foreseen: str | None = None
        """What was taken for the next sentence, and computed ahead: its first phrase and the features of that."""
        self.ahead: tuple[str, list[_Floats]] | None = None

    @property
    def ready(self) -> bool:
        return not self.paused and (bool(self.sentences or self.phrases) or not self.open)

    @property
    def likely(self) -> str | None:
        """The sentence to compute ahead: it only waits for the text after it to show that it is complete."""
        likely = None if self.paused or self.ready else self.reader.likely
        return None if likely == self.foreseen else likely


class AcousticEngine(FlaggedPausing):
    """See the module. The model is a directory with ``hibari.onnx``."""

    def __init__(self, context: StageContext) -> None:
        if context.model is None:
            raise ValueError("hibari_acoustic needs a model")
        context.report("loading the acoustic network")
        from hibari import Hibari

        self._voice: Hibari = Hibari(model=str(context.model / "hibari.onnx"), threads=context.threads)
        self._chunk_frames = msgspec.convert(context.options, AcousticOptions).chunk_frames
        self._requests: dict[RequestId, _Request] = {}
        context.report("reading the lexicon")
        self._reading = Reading(self._voice)
        self._features(self._reading.phrases(_WARM_UP)[0], 1.0)

    @property
    def busy(self) -> bool:
        return any(request.ready or request.likely for request in self._requests.values())

    def start(self, request: StageRequest) -> None:
        self._requests[request.request_id] = _Request(request, SentenceReader(self._voice.split_sentences))

    def feed(self, request_id: RequestId, chunk: Chunk) -> None:
        request = self._requests[request_id]
        text = chunk.data.get("text", "")
        if not isinstance(text, str):
            del self._requests[request_id]
            raise InvalidRequest(f"a text was expected, not {type(text).__name__}", param="input")
        if chunk.source == CLIENT:
            request.script += len(text)
        if request.script > LONGEST_SCRIPT:
            del self._requests[request_id]
            found = f"the text has {request.script} characters or more; at most {LONGEST_SCRIPT} can be spoken"
            raise InvalidRequest(found, param="input", code="string_above_max_length")
        if sentences := request.reader.read(text):
            request.sentences += sentences
            request.foreseen = None
        request.blank = request.blank and not text.strip()
        if chunk.last and request.blank:
            del self._requests[request_id]
            raise InvalidRequest("there is no text to speak", param="input", code="empty")
        request.open.update(chunk)
        if not request.open:
            request.sentences += request.reader.finish()

    def abort(self, request_id: RequestId) -> None:
        self._requests.pop(request_id, None)

    def step(self) -> Iterator[StageOutput | StageFailure]:
        """One sentence of the request that has waited longest; or, where none is due, one ahead."""
        request_id = next((request_id for request_id, request in self._requests.items() if request.ready), None)
        if request_id is None:
            self._compute_ahead(next(request for request in self._requests.values() if request.likely))
            return
        request = self._requests.pop(request_id)
        while not request.phrases and request.sentences:
            sentence = request.sentences.popleft()
            request.phrases += [(p, "" if i else sentence) for i, p in enumerate(self._reading.phrases(sentence))]
        phrase = request.phrases.popleft() if request.phrases else None
        last = not request.open and not request.sentences and not request.phrases
        if not last:
            self._requests[request_id] = request  # at the end of the queue: its turn is over
        if phrase:
            yield from self._chunks(request_id, request, *phrase, last)
        elif last and request.is_script and not request.spoken:
            yield StageFailure(request_id, InvalidRequest(_UNSPEAKABLE, param="input", code="nothing_to_speak"))
        elif last:
            yield StageOutput(request_id, last=True)

    def close(self) -> None:
        self._requests.clear()
        del self._voice, self._reading

    def _compute_ahead(self, request: _Request) -> None:
        """Have the features when the sentence is complete: a language model's next token is a step of it away."""
        request.foreseen = request.likely
        assert request.foreseen is not None
        first = next(iter(self._reading.phrases(request.foreseen)), None)
        if first is None:
            request.ahead = None
        elif request.ahead is None or request.ahead[0] != first:  # "Oh!" and "Oh!!" may sound alike
            request.ahead = (first, self._features(first, request.speed))

    def _chunks(
        self, request_id: RequestId, request: _Request, phonemes: str, text: str, last: bool
    ) -> Iterator[StageOutput]:
        (foreseen, features), request.ahead = request.ahead or ("", []), None
        *spectral, f0 = features if foreseen == phonemes else self._features(phonemes, request.speed)
        frames, sentence = len(f0), request.spoken
        request.spoken += 1
        sizes = chain(self._chunk_frames, repeat(self._chunk_frames[-1]))
        end = 0
        while end < frames:
            start, end = end, min(end + next(sizes), frames)
            names = ("lh", "theta", "ln", "lr", "phi")
            tensors = {n: np.ascontiguousarray(s[:, start:end]) for n, s in zip(names, spectral, strict=True)}
            data: dict[str, Any] = {"sentence": sentence, "start": start, "frames": frames}
            if start == 0:
                tensors["f0"] = f0
                data["text"] = text
            yield StageOutput(request_id, tensors, data, last and end == frames)

    def _features(self, phonemes: str, speed: float) -> list[_Floats]:
        """lh, theta, ln, lr, phi: (601, F), f0: (F,), from a string of phonemes."""
        ids = np.asarray([self._voice.ids(phonemes)], np.int64)
        return [out[0] for out in self._voice.sess.run(None, {"ids": ids, "speed": np.asarray([speed], np.float32)})]
