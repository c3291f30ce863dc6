"""hibari's acoustic network as a stage: text to spectral features, one sentence at a time.

Input, from the client or from a language model: ``data["text"]``, a piece of a script or all of it. A client's script
has at most ``LONGEST_SCRIPT`` characters, all pieces together; a language model's context bounds its text.

Output, for each sentence of F frames (80 a second), in chunks of ``chunk_frames`` frames. A chunk has the frames
[start, start + f): ``data`` has ``sentence`` (its number), ``start``, ``frames`` (F) and, in the sentence's first
chunk, ``text``. ``tensors`` has lh, theta, ln, lr and phi, float32 (601, f) each, C-contiguous, and, in the first
chunk, f0, float32 (F,), in Hz.

Rules
1. A sentence without anything to pronounce (":-)") is left out. A client's script of such sentences only is refused. A
   language model's answer of such sentences only ends without sound, because its text is the answer.
2. A sentence with too many phonemes counts as several sentences. The first of them has the text.
3. The last chunk of the last sentence is the request's last output; if no sentence is left, it is an empty output.
4. Speculation: the text shows that a sentence is complete only when the next word arrives, one step of the language
   model later. A sentence that looks complete (the candidate) is computed before that. If the text then continues the
   sentence ("3.", "14"), the result is thrown away. Outputs are the same with and without speculation. Sentences that
   are complete come first; one that becomes complete meanwhile waits, as it would for any other sentence.
5. The decision of an output is the number of outputs of its sentence that are left, this one included. So a sentence of
   which no output is needed any more is not computed again.

``pronunciation`` turns text into phonemes with hibari's front end; the network is the one in hibari's package.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import accumulate, chain, pairwise, repeat, takewhile
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec
import numpy as np

from omni_actors.stages import base
from omni_actors.stages.engine import PausableEngine
from omni_actors.stages.hibari.options import AcousticOptions, AcousticParams
from omni_actors.stages.hibari.pronunciation import Pronunciation
from omni_actors.stages.hibari.text import SentenceSplitter
from omni_actors.stages.refusal import validated
from omni_actors.stages.sources import OpenSources

if TYPE_CHECKING:
    from hibari import Hibari

_Floats: TypeAlias = "np.ndarray[Any, np.dtype[np.float32]]"

LONGEST_SCRIPT = 16_384
"""Characters; about 18 minutes of speech."""

_UNSPEAKABLE = "nothing in this text can be spoken: the voice reads English words, numbers and common symbols"
_WARM_UP = "This warms up the voice, Xylander."
"""The last word is in no lexicon, so that the rules for unknown words are loaded too."""


class _Request:
    def __init__(self, request: base.StageRequest, splitter: SentenceSplitter) -> None:
        self.open = OpenSources(request.sources)
        self.speed = validated(request.params, AcousticParams).speed
        self.splitter = splitter
        self.is_script = request.sources == (base.CLIENT,)
        """Whether the client alone sends the text."""
        self.is_blank_script = self.is_script
        """Whether this is a script of white space only, so far."""
        self.script_length = 0
        """Characters that the client has sent."""
        self.sentences: deque[str] = deque()
        self.phrases: deque[tuple[str, str]] = deque()
        """(phonemes, text) of the phrases of the next sentence."""
        self.sentences_out = self.outputs = 0
        self.journal, self.needed_from = request.journal, request.needed_from
        self.paused = False
        self.speculated: str | None = None
        """The last candidate that was computed."""
        self.speculation: tuple[str, list[_Floats]] | None = None
        """The phonemes of its first phrase, and their features."""

    @property
    def ready(self) -> bool:
        return not self.paused and (bool(self.sentences or self.phrases) or not self.open)

    @property
    def candidate(self) -> str | None:
        """The sentence to compute speculatively now, if there is one (rule 4)."""
        candidate = None if self.paused or self.ready or self.skippable else self.splitter.candidate
        return None if candidate == self.speculated else candidate

    @property
    def skippable(self) -> int:
        """The number of the next sentence's outputs, if none of them is needed (rule 5); else 0."""
        count = sum(self.journal[self.outputs]) if self.outputs < self.needed_from else 0
        return count if self.outputs + count <= self.needed_from else 0


class AcousticEngine(PausableEngine[_Request]):
    """Computes spectral features, a sentence at a time. ``context.model``: a directory with ``hibari.onnx``."""

    def __init__(self, context: base.StageContext) -> None:
        super().__init__()
        model = context.model_directory / "hibari.onnx"
        context.report("loading the acoustic network")
        from hibari import Hibari

        self._voice: Hibari = Hibari(model=str(model), threads=context.threads)
        self._chunk_frames = msgspec.convert(context.options, AcousticOptions).chunk_frames
        context.report("reading the lexicon")
        self._pronunciation = Pronunciation(self._voice)
        self._features(self._pronunciation.phrases(_WARM_UP)[0], 1.0)

    @property
    def busy(self) -> bool:
        return any(request.ready or request.candidate for request in self._requests.values())

    def _new_request(self, request: base.StageRequest) -> _Request:
        return _Request(request, SentenceSplitter(self._voice.split_sentences))

    def _take(self, request: _Request, chunk: base.Chunk) -> None:
        text = chunk.data.get("text", "")
        if not isinstance(text, str):
            raise base.InvalidRequest(f"text must be a string, not {type(text).__name__}", param="input")
        if chunk.source == base.CLIENT:
            request.script_length += len(text)
        if request.script_length > LONGEST_SCRIPT:
            found = f"the text has at least {request.script_length} characters; the limit is {LONGEST_SCRIPT}"
            raise base.InvalidRequest(found, param="input", code="string_above_max_length")
        if sentences := request.splitter.feed(text):
            request.sentences += sentences
            request.speculated = None
        request.is_blank_script = request.is_blank_script and not text.strip()
        if chunk.last and request.is_blank_script:
            raise base.InvalidRequest("there is no text to speak", param="input", code="empty")
        request.open.update(chunk)
        if not request.open:
            request.sentences += request.splitter.finish()

    def step(self) -> Iterator[base.StageOutput | base.StageFailure]:
        """Compute a sentence of the request that has waited longest or, if no sentence is complete, a candidate."""
        request_id = next((request_id for request_id, request in self._requests.items() if request.ready), None)
        if request_id is None:
            self._speculate(next(request for request in self._requests.values() if request.candidate))
            return
        request = self._requests.pop(request_id)
        if not request.phrases and request.sentences:  # one a step: a script may have many without a phrase
            sentence = request.sentences.popleft()
            request.phrases += [(p, "" if i else sentence) for i, p in enumerate(self._pronunciation.phrases(sentence))]
        phrase = request.phrases.popleft() if request.phrases else None
        last = not request.open and not request.sentences and not request.phrases
        if not last:
            self._requests[request_id] = request  # at the end of the queue
        if phrase:
            yield from self._chunks(request_id, request, *phrase, last)
        elif last and request.is_script and not request.sentences_out:
            error = base.InvalidRequest(_UNSPEAKABLE, param="input", code="nothing_to_speak")
            yield base.StageFailure(request_id, error)
        elif last:
            yield base.StageOutput(request_id, last=True)

    def close(self) -> None:
        super().close()
        del self._voice, self._pronunciation

    def _speculate(self, request: _Request) -> None:
        """Compute the first phrase of the candidate, for when its sentence turns out to be complete."""
        request.speculated = request.candidate
        assert request.speculated is not None
        first = next(iter(self._pronunciation.phrases(request.speculated)), None)
        if first is None:
            request.speculation = None
        elif request.speculation is None or request.speculation[0] != first:  # "Oh!" and "Oh!!" may be pronounced alike
            request.speculation = (first, self._features(first, request.speed))

    def _chunks(
        self, request_id: base.RequestId, request: _Request, phonemes: str, text: str, last: bool
    ) -> Iterator[base.StageOutput]:
        (speculated, features), request.speculation = request.speculation or ("", []), None
        if count := request.skippable:
            request.sentences_out += 1
            request.outputs += count
            for left in range(count, 0, -1):
                yield base.StageOutput(request_id, last=last and left == 1, decisions=(left,), partial=True)
            return
        *spectral, f0 = features if speculated == phonemes else self._features(phonemes, request.speed)
        frames, sentence = len(f0), request.sentences_out
        request.sentences_out += 1
        sizes = accumulate(chain(self._chunk_frames, repeat(self._chunk_frames[-1])))
        ends = [*takewhile(frames.__gt__, sizes), frames]
        request.outputs += len(ends)
        for left, (start, end) in zip(range(len(ends), 0, -1), pairwise([0, *ends]), strict=True):
            names = ("lh", "theta", "ln", "lr", "phi")
            tensors = {n: np.ascontiguousarray(s[:, start:end]) for n, s in zip(names, spectral, strict=True)}
            data: dict[str, Any] = {"sentence": sentence, "start": start, "frames": frames}
            if start == 0:
                tensors["f0"] = f0
                data["text"] = text
            yield base.StageOutput(request_id, tensors, data, last and end == frames, decisions=(left,))

    def _features(self, phonemes: str, speed: float) -> list[_Floats]:
        """Compute [lh, theta, ln, lr, phi, f0] from a string of phonemes: float32 (601, F) each, and (F,)."""
        ids = np.asarray([self._voice.ids(phonemes)], np.int64)
        return [out[0] for out in self._voice.sess.run(None, {"ids": ids, "speed": np.asarray([speed], np.float32)})]
