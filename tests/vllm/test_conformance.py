"""What ``stages.base`` asks of every engine, asked of these: the cases of ``tests.stages.test_conformance``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.stages.test_conformance import (
    Case,
    llm,
    qwen2_5_thinker,
    qwen3_thinker,
    test_a_bad_chunk_refuses_its_own_request_only,
    test_a_request_gives_its_outputs_and_exactly_one_last,
    test_a_request_that_joins_between_steps_gives_what_it_gives_alone,
    test_abort_frees_a_request_in_every_state,
    test_an_engine_that_replays_gives_the_same_chunks_whatever_the_timing,
    test_an_engine_without_work_is_not_busy,
    test_an_id_can_be_used_again_after_its_end,
    test_nothing_is_kept_of_a_request_that_has_ended,
    test_requests_side_by_side_give_what_each_gives_alone,
)

__all__ = [
    "test_a_bad_chunk_refuses_its_own_request_only",
    "test_a_request_gives_its_outputs_and_exactly_one_last",
    "test_a_request_that_joins_between_steps_gives_what_it_gives_alone",
    "test_abort_frees_a_request_in_every_state",
    "test_an_engine_that_replays_gives_the_same_chunks_whatever_the_timing",
    "test_an_engine_without_work_is_not_busy",
    "test_an_id_can_be_used_again_after_its_end",
    "test_nothing_is_kept_of_a_request_that_has_ended",
    "test_requests_side_by_side_give_what_each_gives_alone",
]


@pytest.fixture(scope="module", params=[llm, qwen3_thinker, qwen2_5_thinker], ids=lambda made: made.__name__)
def case(request: pytest.FixtureRequest) -> Case:
    """As of the engine on transformers."""
    made: Case = request.param(request)
    made.name = "vllm" if made.name == "llm" else f"vllm_{made.name}"
    return made


@pytest.fixture
def driver(case: Case, drive: Callable[..., Any]) -> Any:
    return drive(case.name)
