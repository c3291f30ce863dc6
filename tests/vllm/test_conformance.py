"""The conformance suite of ``StageEngine``, for the engines on vLLM."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.support.conformance import EngineConformance
from tests.support.engine_cases import Case, llm, qwen2_5_thinker, qwen3_thinker


@pytest.fixture(scope="module", params=[llm, qwen3_thinker, qwen2_5_thinker], ids=lambda made: made.__name__)
def case(request: pytest.FixtureRequest) -> Case:
    """The case of the engine on transformers."""
    made: Case = request.param(request)
    made.name = "vllm" if made.name == "llm" else f"vllm_{made.name}"
    return made


@pytest.fixture
def driver(case: Case, drive: Callable[..., Any]) -> Any:
    return drive(case.name)


class TestConformance(EngineConformance):
    pass
