"""hibari itself, and the engines of its two stages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture(scope="session")
def voice() -> Any:
    """The reference: hibari itself."""
    from hibari import Hibari

    return Hibari(threads=1)


@pytest.fixture
def acoustic(drive: Callable[..., Any]) -> Any:
    return drive("hibari_acoustic")


@pytest.fixture
def vocoder(drive: Callable[..., Any]) -> Any:
    return drive("hibari_vocoder")
