"""How many native threads a worker computes with, and how they wait for work."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from omni_actors import OmniSystem
from omni_actors.config import Pipeline, Stage
from omni_actors.stages.base import StageFailure, StageOutput
from omni_actors.stages.echo.engine import EchoEngine

CORES = len(os.sched_getaffinity(0))


class WaitingEngine(EchoEngine):
    """Answers with how the OpenMP threads of its worker wait. Workers import it by name."""

    def step(self) -> Iterator[StageOutput | StageFailure]:
        for output in super().step():
            assert isinstance(output, StageOutput)
            yield StageOutput(output.request_id, {}, {"text": str(os.environ.get("OMP_WAIT_POLICY"))}, output.last)


@pytest.mark.parametrize(("shared", "policy"), [(True, "PASSIVE"), (False, "None")])
async def test_one_setting_leaves_the_waiting_to_the_native_libraries(
    shared: bool, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    stage = Stage(engine=f"{__name__}:WaitingEngine", accepts=("messages",), emits="text", threads=CORES + 1)
    async with OmniSystem.open(Pipeline(name="one", stages={"only": stage}, cpu_sharing=shared)) as omni:
        answer = "".join([output.delta async for output in omni.generate("how?") if isinstance(output.delta, str)])
    assert answer == policy, "as many threads do not fit on the cores"


LOGITS = """
from omni_actors.worker.main import prepare_libraries

prepare_libraries(4, spins=False)  # as a worker does before it loads torch

import torch
from omni_actors.stages import assets
from omni_actors.stages.base import CLIENT, Chunk, StageContext, StageRequest
from omni_actors.stages.llm.engine import open_engine
from tests.support.clear_choices import patched_choices
from tests.support.closeness import assert_close

model = assets.resolve("smollm2-135m-instruct")
engine = open_engine(StageContext("llm", model, {"prefill_chunk": 32}, 4, "cpu", print))
decoder = engine._model.model
decoder.layers = decoder.layers[:6]  # all thirty are alike: the others would only take time
logits, forward = [], engine._forward

def noted(rows, count):
    result = forward(rows, count)
    logits.append(result.clone())
    return result

engine._forward = noted

def answers():
    logits.clear()
    for number, question in enumerate(["Why is the sky blue?", "Who wrote Hamlet? " * 8, "What do bees make?"]):
        engine.start(StageRequest(number, (CLIENT,), {"max_tokens": 4 + 3 * number}))
        engine.feed(number, Chunk(CLIENT, 0, True, {}, {"messages": [{"role": "user", "content": question}]}))
        list(engine.step())
    while engine.busy:
        list(engine.step())
    return list(logits)

with patched_choices():
    alone = answers()
for threads in (1, 2, 3):
    torch.set_num_threads(threads)
    with patched_choices():
        other = answers()
    assert len(other) == len(alone) > 10
    for one, another in zip(other, alone):
        assert_close(one, another)
"""


@pytest.mark.slow
@pytest.mark.voice
def test_the_language_models_logits_do_not_depend_on_the_number_of_threads() -> None:
    subprocess.run([sys.executable, "-c", LOGITS], check=True, timeout=300)
