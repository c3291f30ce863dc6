"""The features equal those of transformers."""

from __future__ import annotations

import numpy as np
import pytest

from omni_actors.turns.log_mel import SAMPLES, log_mel

pytestmark = pytest.mark.voice


@pytest.mark.parametrize("zeros", [0, 100_000, SAMPLES])
def test_the_features_equal_those_of_transformers(zeros: int) -> None:
    from transformers import WhisperFeatureExtractor

    sound = np.random.default_rng(zeros).uniform(-0.5, 0.5, SAMPLES).astype(np.float32)
    sound[:zeros] = 0
    extractor = WhisperFeatureExtractor(chunk_length=8)
    expected = extractor(sound, sampling_rate=16_000, do_normalize=True, return_tensors="np").input_features[0]
    found = log_mel(sound)
    assert found.shape == expected.shape == (80, 800)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected, atol=1e-4)  # float64 here, float32 there in parts
