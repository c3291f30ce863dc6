"""The acoustic features that hibari itself computes for a sentence."""

from __future__ import annotations

from typing import Any

import numpy as np

SEA = "The sea was calm that morning, and the old fisherman rowed his small boat far out."
NAMES = ("lh", "theta", "ln", "lr", "phi")


def features_of(voice: Any, text: str) -> list[Any]:
    """Return the network's lh, theta, ln, lr, phi and f0 for a sentence."""
    ids = np.asarray([voice.ids(voice.phonemize(text)[0])], np.int64)
    return [out[0] for out in voice.sess.run(None, {"ids": ids, "speed": np.ones(1, np.float32)})]
