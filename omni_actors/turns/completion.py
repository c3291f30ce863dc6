"""How probable it is that a user has finished: the turn detection model smart-turn, version 3.2.

The ONNX file is a part of pipecat-ai, which is never imported. Tensors: ``input_features`` float32 (n, 80, 800), see
``log_mel``; ``logits`` float32 (n, 1), which are probabilities in spite of the name. The model was trained on the last
8 seconds of a turn, with zeros before a shorter one. Source: https://github.com/pipecat-ai/smart-turn.
"""

from __future__ import annotations

import numpy as np

from omni_actors.turns.log_mel import SAMPLES, Floats, log_mel
from omni_actors.turns.shared_model import SharedModel

MODEL = SharedModel("smart-turn", "smart-turn-v3.2-cpu.onnx")


def load() -> None:
    """Load the model, if this process has not yet. Raises assets.ModelNotFound: pipecat-ai is not installed."""
    MODEL.session()


def completion_probability(turn: Floats) -> float:
    """Return the probability that the user has finished the turn. It takes about 40 ms of one core.

    turn: float32 (n,), 16 kHz, n <= 128000: the end of the turn, and the beginning of the pause after it.
    """
    sound = np.zeros(SAMPLES, np.float32)
    sound[SAMPLES - len(turn) :] = turn
    logits = MODEL.session().run(None, {"input_features": log_mel(sound)[None]})[0]
    return float(logits[0, 0])
