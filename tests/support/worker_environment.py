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
    with _hooks(OMNI_ACTORS_TEST_CLEAR_CHOICES="1"):
        yield


@contextmanager
def noisy_workers(seed: int) -> Iterator[None]:
    """Give the workers that are started within the block the noise of ``tests.support.decision_noise``.

    Within a running system, these are all incarnations after the first.
    """
    with _hooks(OMNI_ACTORS_TEST_DECISION_NOISE=str(seed)):
        yield


def clear_choices() -> dict[str, str]:
    """Return the variables that let a worker choose by these rules, for the environment of a stage."""
    return _variables(OMNI_ACTORS_TEST_CLEAR_CHOICES="1")


@contextmanager
def _hooks(**variables: str) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in _variables(**variables).items():
            patch.setenv(name, value)
        yield


def _variables(**variables: str) -> dict[str, str]:
    path = os.pathsep.join([str(Path(__file__).parent / "process_hooks"), os.environ.get("PYTHONPATH", "")])
    return {"PYTHONPATH": path, **variables}
