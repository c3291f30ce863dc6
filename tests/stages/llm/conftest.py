"""The llm engine on a tiny random model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from omni_actors.stages.llm.engine import LLMEngine
from tests.stages.llm.tiny_engine import assert_empty, opened
from tiny_models.llama import save_model


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def shared_tiny(tiny: Path) -> Iterator[LLMEngine]:
    with closing(opened(tiny)) as engine:
        yield engine


@pytest.fixture
def engine(shared_tiny: LLMEngine) -> Iterator[LLMEngine]:
    """The tiny model's engine. A test that leaves a request in it fails; the fixture then removes the request."""
    yield shared_tiny
    left = list(shared_tiny._requests)
    for request_id in left:
        shared_tiny.abort(request_id)
    assert not left
    assert_empty(shared_tiny)
