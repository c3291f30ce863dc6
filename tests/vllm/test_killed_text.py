"""SIGKILL of a language model on vLLM: the next worker goes on with its answers, and decodes no token again."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import trio

from omni_actors import OmniSystem
from omni_actors.config import Pipeline, Restart, Stage
from omni_actors.orchestrator.resumption import Resumption
from omni_actors.outputs import Output
from tests.support.shared_system import SharedSystem, open_shared_system
from tests.vllm.split_model import ARGS, IDS, save

PROMPT: Any = {"prompt_token_ids": [*range(4, 44)]}
TOKENS = 60
ONE: dict[str, Any] = {**IDS, "max_tokens": TOKENS}
"""One token in each output."""
SEVERAL: dict[str, Any] = {**ONE, "n": 2}
STRUCTURED: dict[str, Any] = {
    "structured_outputs": {"regex": "[a-z ]{200}"},
    "extra_args": {},
    "temperature": 0.0,
    "ignore_eos": False,
}
LABELS = {"stage": "llm", "replica": "0", "name": "generation_tokens"}
WATCHDOG_S = 120.0


@pytest.fixture(scope="module")
def shared_system(fixture_processes: set[int], tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedSystem]:
    stage = Stage(
        engine="vllm",
        model=str(save(tmp_path_factory.mktemp("tiny"))),
        threads=1,
        accepts=("messages",),
        emits="text",
        options={
            "engine_args": {**ARGS, "logits_processors": [f"tests.vllm.processors:{n}" for n in ("Own", "Faulty")]}
        },
        restart=Restart(intensity=1000, backoff_s=0.01, backoff_max_s=0.01),
        step_timeout_s=20.0,
    )
    pipeline = Pipeline(name="text", stages={"llm": stage})
    with open_shared_system(lambda: OmniSystem.open(pipeline), fixture_processes) as shared:
        yield shared


async def answer(omni: OmniSystem, params: dict[str, Any]) -> list[Output]:
    with trio.fail_after(WATCHDOG_S):
        return [output async for output in omni.generate(PROMPT, **params)]


async def answer_of_killed(omni: OmniSystem, params: dict[str, Any], at: int, directory: Path) -> list[Output]:
    """Kill the worker when it is about to choose token number ``at``, from 1 on, and the client has those before."""
    fifo = directory / "held"
    os.mkfifo(fifo)
    fault = {"fault": "hang", "at": at, "notify": str(fifo)}
    generation = omni.generate(PROMPT, **{**params, "extra_args": {**params["extra_args"], **fault}})
    [replica] = omni.health().stages["llm"]
    assert replica.pid is not None
    outputs: list[Output] = []
    with trio.fail_after(WATCHDOG_S):
        await trio.to_thread.run_sync(fifo.read_bytes, abandon_on_cancel=True)  # until the engine opens it
        fifo.unlink()
        if at > 1:
            outputs += [await anext(generation)]
        os.kill(replica.pid, signal.SIGKILL)
        return outputs + [output async for output in generation]


def tokens(outputs: list[Output], index: int | None = None) -> list[int]:
    found = [output.data.get("token_ids", ()) for output in outputs if output.data.get("index") == index]
    return [token for each in found for token in each]


def replays(outputs: list[Output]) -> int:
    metrics = outputs[-1].metrics
    assert metrics is not None
    return metrics.replays


@pytest.mark.parametrize(
    "params",
    [
        pytest.param({"frequency_penalty": 0.3}, id="drawn"),
        pytest.param(STRUCTURED, id="structured"),
        pytest.param({"logprobs": 1, "prompt_logprobs": 1}, id="logprobs"),
    ],
)
def test_the_next_worker_decodes_no_token_again(
    shared_system: SharedSystem, tmp_path: Path, params: dict[str, Any]
) -> None:
    known: list[int] = []
    entries = Resumption.entries

    def noted(self: Resumption, stage: str) -> Any:
        known.append(self.known[stage])
        return entries(self, stage)

    async def work(omni: OmniSystem) -> None:
        expected = await answer(omni, {**ONE, **params})
        with mock.patch.object(Resumption, "entries", noted):
            outputs = await answer_of_killed(omni, {**ONE, **params}, 2 * TOKENS // 3, tmp_path)
        assert tokens(outputs) == tokens(expected)
        assert {**outputs[-1].data, "logprobs": None} == {**expected[-1].data, "logprobs": None}
        assert (replays(outputs), len(known)) == (1, 1)
        assert known[0] > 1
        decoded = TOKENS - known[0]
        with trio.fail_after(WATCHDOG_S):
            while omni.metrics.registry.get_sample_value("omni_engine", LABELS) != decoded:  # noqa: ASYNC110
                await trio.sleep(0.05)  # the worker tells it with its next answer to a ping

    shared_system.run(work)


def test_several_answers_of_which_the_client_has_nothing_are_repeated(
    shared_system: SharedSystem, tmp_path: Path
) -> None:
    async def work(omni: OmniSystem) -> None:
        expected = await answer(omni, SEVERAL)
        outputs = await answer_of_killed(omni, SEVERAL, 1, tmp_path)
        assert replays(outputs) == 1
        for index in range(2):
            assert len(tokens(outputs, index)) == TOKENS
            assert tokens(outputs, index) == tokens(expected, index)

    shared_system.run(work)


def test_several_answers_of_which_the_client_has_a_part_go_on(shared_system: SharedSystem, tmp_path: Path) -> None:
    async def work(omni: OmniSystem) -> None:
        expected = await answer(omni, SEVERAL)
        outputs = await answer_of_killed(omni, SEVERAL, TOKENS // 2, tmp_path)
        assert replays(outputs) == 1
        for index in range(2):
            assert tokens(outputs, index) == tokens(expected, index)
        assert outputs[-1].data["completion_tokens"] == 2 * TOKENS

    shared_system.run(work)
