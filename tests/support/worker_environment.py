"""What the workers that a test starts inherit."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def clear_choices_in_workers() -> Iterator[None]:
    """Let the workers that are started within the block choose by the rules of ``tests.support.clear_choices``."""
    path = os.pathsep.join([str(Path(__file__).parent / "process_hooks"), os.environ.get("PYTHONPATH", "")])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", path)
        patch.setenv("OMNI_ACTORS_TEST_CLEAR_CHOICES", "1")
        yield
