"""hibari's vocoder as a stage: spectral features to a waveform, as the features arrive.

Input: the outputs of ``AcousticEngine`` (see ``acoustic``), sentence after sentence, each in any number of chunks.

Output: ``tensors["audio"]``, float32 (n,); ``data["sample_rate"]`` (24000) and ``data["sentence"]``. The first output
of a sentence has ``data["sentence_text"]``, so that its words can be related to its sound. A sentence of F frames gives
F * 300 samples, which do not depend on the chunks (to 1e-6). A step synthesizes one chunk of every request that has
one. The chunk that ends the input gives the request's last output, which may have no audio.

The noise in the voice is drawn from the request's ``seed`` and the number of the sentence, so the same input always
gives the same audio. With ``StageRequest.needed_from``, samples of earlier outputs are not computed, apart from those
of the three frames before the first needed chunk.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator

import numpy as np

from omni_actors.stages.base import Chunk, InvalidRequest, StageContext, StageOutput, StageRequest
from omni_actors.stages.engine import PausableEngine
from omni_actors.stages.hibari.options import VocoderParams
from omni_actors.stages.hibari.synthesis import BINS, SAMPLE_RATE, Floats, SentenceSynthesis
from omni_actors.stages.refusal import validated
from omni_actors.stages.sources import OpenSources

_SPECTRAL = ("lh", "theta", "ln", "lr", "phi")
_MOST_FRAMES = 1 << 15
"""The longest sentence: 7 minutes. Its noise is drawn at once and takes 4.8 kB a frame."""


class _Request:
    def __init__(self, request: StageRequest) -> None:
        seed = validated(request.params, VocoderParams).seed
        self.seed = seed % 2**64  # numpy accepts no negative seed
        self.open = OpenSources(request.sources)
        self.needed_from, self.outputs = request.needed_from, 0
        self.chunks: deque[tuple[int, list[Floats], bool, str]] = deque()
        """Sentence, features (see ``names``; [] if the chunk only ends the input), whether it is the last, and text."""
        self.text = ""
        """The text of the sentence, until an output has it."""
        self.sentence = 0
        """The sentence that the next chunk must belong to."""
        self.frame = 0
        """The frame of that sentence at which the next chunk must start."""
        self.frames = 0
        """Number of frames of that sentence; 0 before its first chunk."""
        self.synthesis: SentenceSynthesis | None = None
        self.paused = False

    @property
    def ready(self) -> bool:
        return bool(self.chunks) and not self.paused

    @property
    def names(self) -> tuple[str, ...]:
        """The features of the next chunk, float32 (601, f) each. A sentence's first chunk also has f0, (frames,)."""
        return _SPECTRAL if self.frames else (*_SPECTRAL, "f0")

    def take(self, chunk: Chunk) -> None:
        """Validate a chunk and keep a copy. Raises InvalidRequest."""
        sentence, features = self.sentence, list[Floats]()
        if chunk.tensors:
            self._check(chunk)
            features = [chunk.tensors[name].numpy().copy() for name in self.names]
            if not all(np.isfinite(feature).all() for feature in features):
                raise _refusal(f"some features of sentence {sentence} are not finite")
            self.frames = self.frames or len(features[-1])
            self.frame += features[0].shape[1]
            if self.frame == self.frames:
                self.sentence, self.frame, self.frames = sentence + 1, 0, 0
        self.open.update(chunk)
        if not self.open and self.frames:
            raise _refusal(f"the features end in the middle of sentence {self.sentence}")
        if features or not self.open:
            self.chunks.append((sentence, features, not self.open, chunk.data.get("text", "")))

    def _check(self, chunk: Chunk) -> None:
        # This looks at names and shapes only: an exception would keep an array, a view of the chunk, alive.
        if missing := [name for name in self.names if name not in chunk.tensors]:
            raise _refusal(f"the chunk lacks {', '.join(missing)}")
        place = (chunk.data.get("sentence"), chunk.data.get("start"))
        if place != (self.sentence, self.frame):
            raise _refusal(f"found frame {place[1]} of sentence {place[0]}, expected {self.frame} of {self.sentence}")
        shapes = {name: chunk.tensors[name].shape for name in self.names}
        if not isinstance(chunk.data.get("text", ""), str):
            raise _refusal("the text of the sentence is not text")
        frames = self.frames or math.prod(shapes["f0"])
        f = shapes["lh"][-1] if shapes["lh"] else 0
        expected = {name: (frames,) if name == "f0" else (BINS, f) for name in self.names}
        floats = all(chunk.tensors[name].dtype == "float32" for name in self.names)
        if not floats or shapes != expected or not 1 <= f <= frames - self.frame:
            raise _refusal(f"features of shapes {shapes} do not fit the sentence")
        if frames > _MOST_FRAMES:
            raise _refusal(f"a sentence has {frames} frames; the limit is {_MOST_FRAMES}")

    def synthesize(self) -> tuple[Floats | None, int, bool]:
        """Return the samples of the next chunk (None: none is final), its sentence, and whether it is the last.

        If the samples are not needed, an empty array takes their place.
        """
        sentence, features, last, text = self.chunks.popleft()
        self.text = text or self.text
        if not features:
            return None, sentence, last
        if len(features) > len(_SPECTRAL):
            self.synthesis = SentenceSynthesis(features.pop(), np.random.default_rng([self.seed, sentence]))
        assert self.synthesis is not None
        if self.outputs < self.needed_from:
            audio, final = np.empty(0, np.float32), self.synthesis.skip(*features)
        else:
            audio = self.synthesis.add(*features)
            final = len(audio)
        if self.synthesis.done == self.synthesis.frames:
            self.synthesis = None
        self.outputs += bool(final)
        return audio if final else None, sentence, last


def _refusal(message: str) -> InvalidRequest:
    return InvalidRequest(message, param="features")


class VocoderEngine(PausableEngine[_Request]):
    """Synthesizes audio from spectral features, by signal processing: it has no model."""

    def __init__(self, context: StageContext) -> None:
        super().__init__()
        context.report("warming up")
        silence = np.full((BINS, 4), -20, np.float32)
        SentenceSynthesis(np.full(4, 100, np.float32), np.random.default_rng(0)).add(*[silence] * 5)

    def _new_request(self, request: StageRequest) -> _Request:
        return _Request(request)

    def _take(self, request: _Request, chunk: Chunk) -> None:
        request.take(chunk)

    def step(self) -> Iterator[StageOutput]:
        for request_id in [request_id for request_id, request in self._requests.items() if request.ready]:
            request = self._requests[request_id]
            audio, sentence, last = request.synthesize()
            if last:
                del self._requests[request_id]
            data: dict[str, int | str] = {"sample_rate": SAMPLE_RATE, "sentence": sentence}
            if audio is not None:
                if request.text:
                    data["sentence_text"], request.text = request.text, ""
                tensors = {"audio": audio} if len(audio) else {}
                yield StageOutput(request_id, tensors, data, last, partial=not tensors)
            elif last:
                yield StageOutput(request_id, data={"sample_rate": SAMPLE_RATE}, last=True)
