"""Raw prompts with real processes and signals: the client gets one continuous answer when the worker is killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio

from omni_actors import OmniSystem, Output
from omni_actors.config import Pipeline, Restart, Stage
from tests.support.echo_systems import pid_of
from tests.support.shared_system import SharedSystem, open_shared_system
from tiny_models.llama import save_model

pytestmark = pytest.mark.slow  # make test resumes them in one process: stages/llm/test_raw_prompts.py

WATCHDOG_S = 100.0
TEXT = "the quick brown fox <|im_start|>jumps over"
SAMPLED = {"temperature": 1.0, "seed": 3, "max_tokens": 24, "ignore_eos": True}
KILL_AT = (1, 7)


@pytest.fixture(scope="module")
def shared_system(
    fixture_processes: set[int], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[SharedSystem, Path]]:
    model = save_model(tmp_path_factory.mktemp("llama"))
    often = Restart(intensity=100, backoff_s=0.01, backoff_max_s=0.01)
    options = {"context": 128, "prefill_chunk": 7}
    stage = Stage(
        engine="llm", model=str(model), accepts=("messages",), emits="text", threads=1, options=options, restart=often
    )
    pipeline = Pipeline(name="tiny", stages={"only": stage})
    with open_shared_system(lambda: OmniSystem.open(pipeline), fixture_processes, clear_choices=True) as opened:
        yield opened, model


def prompt(model: Path, kind: str) -> Any:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokens = AutoTokenizer.from_pretrained(model).encode(TEXT)
    table = AutoModelForCausalLM.from_pretrained(model).get_input_embeddings().weight.detach()
    return {"prompt": TEXT, "prompt_token_ids": tokens, "prompt_embeds": table[tokens]}[kind]


async def read(omni: OmniSystem, asked: Any, kill_at: int = 0) -> list[Output]:
    outputs = []
    with trio.fail_after(WATCHDOG_S):
        async for output in omni.generate(asked, **SAMPLED):
            outputs.append(output)
            if len(outputs) == kill_at:
                os.kill(pid_of(omni, "only"), signal.SIGKILL)
        while not omni.health().ready:
            await omni.wait_changed()
    return outputs


@pytest.mark.parametrize("kind", ["prompt", "prompt_token_ids", "prompt_embeds"])
def test_an_answer_to_a_raw_prompt_goes_on_after_a_kill(shared_system: tuple[SharedSystem, Path], kind: str) -> None:
    opened, model = shared_system
    asked = {kind: prompt(model, kind)}

    async def work(omni: OmniSystem) -> None:
        expected = await read(omni, asked)
        for kill_at in KILL_AT:
            found = await read(omni, asked, kill_at)
            assert [(output.delta, output.data) for output in found] == [(o.delta, o.data) for o in expected]
            assert found[-1].metrics is not None
            assert found[-1].metrics.replays == 1
        assert expected[-1].data["prompt_tokens"] == len(np.atleast_1d(prompt(model, "prompt_token_ids")))

    opened.run(work)
