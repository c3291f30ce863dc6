"""SIGKILL of a language model on vLLM with speculative decoding: a greedy answer goes on as if nothing had happened."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import trio

from omni_actors import OmniSystem
from omni_actors.config import Pipeline, Restart, Stage
from omni_actors.outputs import Output
from tests.support.shared_system import SharedSystem, open_shared_system
from tests.vllm.split_model import ARGS, save
from tests.vllm.test_killed_text import WATCHDOG_S, replays, tokens

PROMPT: Any = {"prompt_token_ids": [*range(4, 14)] * 4}
GREEDY: dict[str, Any] = {
    "temperature": 0.0,
    "ignore_eos": True,
    "detokenize": False,
    "max_tokens": 200,
    "allowed_token_ids": [5, 6, 7],
}
"""The answer repeats itself, so drafts are accepted."""


@pytest.fixture(scope="module")
def shared_system(fixture_processes: set[int], tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedSystem]:
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
    stage = Stage(
        engine="vllm",
        model=str(save(tmp_path_factory.mktemp("tiny"))),
        threads=1,
        accepts=("messages",),
        emits="text",
        options={"engine_args": {**ARGS, "logits_processors": [], "speculative_config": drafts}},
        restart=Restart(intensity=1000, backoff_s=0.01, backoff_max_s=0.01),
        step_timeout_s=60.0,  # the first draft has numba compile
    )
    pipeline = Pipeline(name="text", stages={"llm": stage})
    with open_shared_system(lambda: OmniSystem.open(pipeline), fixture_processes) as shared:
        yield shared


async def read_and_kill_twice(omni: OmniSystem) -> list[Output]:
    """Read an answer, and kill the worker with the first output from each of the first two workers that are ready."""
    outputs, killed = list[Output](), set[int]()
    async for output in omni.generate(PROMPT, **GREEDY):
        outputs.append(output)
        [replica] = omni.health().stages["llm"]
        if len(killed) < 2 and replica.state == "ready" and replica.pid not in {None, *killed}:
            os.kill(replica.pid, signal.SIGKILL)
            killed.add(replica.pid)
    return outputs


@pytest.mark.timeout(600)  # three workers load, or more of them, and numba compiles in each
def test_a_greedy_answer_goes_on_after_each_of_two_deaths(shared_system: SharedSystem) -> None:
    async def work(omni: OmniSystem) -> None:
        with trio.fail_after(WATCHDOG_S):
            expected = [output async for output in omni.generate(PROMPT, **GREEDY)]
        assert any(len(output.data["token_ids"]) > 1 for output in expected), "a draft was accepted"
        for _ in range(3):  # the answer may be complete before a death, if this process stands still
            with trio.fail_after(WATCHDOG_S):
                outputs = await read_and_kill_twice(omni)
            assert tokens(outputs) == tokens(expected)
            assert outputs[-1].data == {**expected[-1].data, "token_ids": outputs[-1].data["token_ids"]}
            assert replays(outputs) <= 2
            if replays(outputs) > 0:
                return
        pytest.fail("each answer was complete before a death")

    shared_system.run(work)
