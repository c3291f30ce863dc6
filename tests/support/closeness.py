"""Compare what engines compute, on any machine.

Floats are compared with a margin: kernels round differently for other instruction sets, thread counts and batch shapes.
Everything else (text, counts, integers, booleans) is compared exactly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

OF_LARGEST = 1e-4
"""How far a float may be off, as a part of the largest value of its array.

Rounding moves the rows and samples of the models under test by up to 1e-5 of it (`make test-portable` shows that),
another row or another request's samples by about all of it.
"""


OF_FULL_SCALE = 3e-3
"""How far a sample of sound may be off: 50 dB below full scale.

The vocoders with random weights amplify rounding to 5e-4. The sound of these tests exceeds 0.05 somewhere.
"""


def assert_close(found: Any, expected: Any, amplified: float = 1.0) -> None:
    """Both are arrays or tensors of floats, of the same shape and dtype, within ``OF_LARGEST``.

    ``amplified``: by what factor the computation after the model enlarges the model's rounding.
    """
    found, expected = (each.cpu() if isinstance(each, torch.Tensor) else each for each in (found, expected))
    found, expected = np.asarray(found), np.asarray(expected)
    assert found.dtype == expected.dtype
    largest = float(np.abs(expected).max(initial=0.0))
    np.testing.assert_allclose(found, expected, rtol=0, atol=OF_LARGEST * amplified * largest)


def assert_same_sound(found: Any, expected: Any) -> None:
    """Both are float32 samples within [-1, 1], as many of them, within ``OF_FULL_SCALE``."""
    np.testing.assert_allclose(found, expected, rtol=0, atol=OF_FULL_SCALE)


def assert_same_picture(found: Any, expected: Any) -> None:
    """Both are uint8 pixels of the same shape. Rounding moves a value across the border of the next one, no further."""
    found, expected = np.asarray(found), np.asarray(expected)
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    assert np.abs(found.astype(int) - expected.astype(int)).max(initial=0) <= 1


def assert_same_results(found: Any, expected: Any) -> None:
    """Nested dicts, lists and tuples are equal: floats within a margin, everything else exactly.

    The pixels of a tensor ``image`` may differ by 1. The margin of a tensor ``audio`` is ``OF_FULL_SCALE``, that of
    other arrays ``OF_LARGEST``.
    """
    if isinstance(expected, Mapping):
        assert found.keys() == expected.keys()
        compare = {"audio": assert_same_sound, "image": assert_same_picture}
        for key, value in expected.items():
            compare.get(key, assert_same_results)(found[key], value)
    elif isinstance(expected, Sequence) and not isinstance(expected, (str, bytes)):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_same_results(one, other)
    elif hasattr(expected, "dtype"):
        found, expected = np.asarray(found), np.asarray(expected)
        if expected.dtype.kind == "f":
            assert_close(found, expected)
        else:
            np.testing.assert_array_equal(found, expected)
    else:
        assert found == expected
