"""What the vLLM engines can do beside requests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing

import pytest

from omni_actors.protocol.messages import Call, CallAnswer
from omni_actors.stages.base import StageEngine
from omni_actors.worker.calls import WorkerCalls
from tests.worker.test_calls import value_of


def answered(engine: StageEngine, capability: str, **arguments: object) -> CallAnswer:
    return WorkerCalls("here", lambda: 0).answer(engine, Call(1, capability, arguments))


@pytest.fixture(scope="module")
def engine(open_stage: Callable[..., StageEngine]) -> Iterator[StageEngine]:
    arguments = {"enable_prefix_caching": True, "enable_prompt_embeds": False}
    with closing(open_stage("vllm", engine_args=arguments)) as engine:
        yield engine


def test_the_prefix_cache_is_vllm_s_own(engine: StageEngine) -> None:
    assert value_of(answered(engine, "reset_prefix_cache", reset_running_requests=False)) is True


@pytest.mark.parametrize("capability", ["reset_mm_cache", "reset_encoder_cache", "sleep", "wake_up"])
def test_what_this_model_or_machine_cannot_do_is_unsupported_with_the_reason(
    engine: StageEngine, capability: str
) -> None:
    refusal = answered(engine, capability).refusal
    assert refusal is not None
    assert refusal.unsupported == capability
    assert ("text only" if capability.startswith("reset") else "on a CPU") in refusal.message


def test_a_method_of_the_ranks_is_called_by_name(engine: StageEngine) -> None:
    arguments = {"timeout_s": 5.0, "args": [], "kwargs": {}}
    assert value_of(answered(engine, "collective_rpc", method="check_health", **arguments)) == [None]
    refusal = answered(engine, "collective_rpc", method="no_such_method", **arguments).refusal
    assert refusal is not None
    assert (refusal.code, refusal.param) == ("call_failed", "method")
