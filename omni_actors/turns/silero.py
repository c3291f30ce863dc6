"""How probable speech is in each window of a stream: the voice activity detector Silero, version 6.

The ONNX file is a part of faster-whisper. Tensors: ``input`` float32 (windows, 576): the last 64 samples of the window
before, then the 512 samples of the window, at 16 kHz; ``h`` and ``c`` float32 (1, 1, 128): the state. The model returns
``speech_probs`` float32 (windows,) and the new state. Source: https://github.com/snakers4/silero-vad.

Rules
1. Windows are computed one by one, so that a probability does not depend on how the sound was cut into chunks: kernels
   round differently for other batch sizes. A window costs 0.1 ms.
2. The model is shared by all threads and streams; its state is kept here.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from omni_actors.turns.shared_model import SharedModel

SAMPLE_RATE = 16_000
WINDOW = 512
"""Samples of a window: 32 ms."""
_CONTEXT = 64


MODEL = SharedModel("silero-vad", "silero_vad_v6.onnx")


class SpeechProbability:
    """Computes the probability of speech in one stream of sound. Loads the model if this process has not yet.

    Raises assets.ModelNotFound: faster-whisper is not installed.
    """

    def __init__(self) -> None:
        self._session = MODEL.session()
        self._input = np.zeros((1, _CONTEXT + WINDOW), np.float32)
        self._h = self._c = np.zeros((1, 1, 128), np.float32)

    def of(self, window: np.ndarray[Any, np.dtype[np.float32]]) -> float:
        """Return the probability of speech in the next window of the stream: float32 (512,), 16 kHz, in [-1, 1]."""
        self._input[0, _CONTEXT:] = window
        inputs = {"input": self._input, "h": self._h, "c": self._c}
        probability, self._h, self._c = self._session.run(None, inputs)
        self._input[0, :_CONTEXT] = window[-_CONTEXT:]
        return float(probability[0])
