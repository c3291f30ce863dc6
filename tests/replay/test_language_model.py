"""A language model with real processes and signals: the client gets the same answer when the worker is killed.

Answers to raw prompts, answers of a given structure, and embeddings.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio

from omni_actors import Generation, OmniSystem, Output
from omni_actors.config import Limits, Pipeline, Restart, Stage
from omni_actors.system.texts import Pooling
from tests.support.echo_systems import generation_of, pid_of, wait_restarted
from tests.support.shared_system import SharedSystem, open_shared_system
from tiny_models.llama import save_model

pytestmark = pytest.mark.slow  # make test resumes answers in one process: stages/llm

WATCHDOG_S = 100.0
TEXT = "the quick brown fox <|im_start|>jumps over"
SAMPLED = {"temperature": 1.0, "seed": 3, "max_tokens": 24, "ignore_eos": True}
FORMED = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}, "warm": {"type": "boolean"}},
    "required": ["city", "warm"],
    "additionalProperties": False,
}
KILL_AT = (1, 7)
GUIDED = {"guidance_scale": 2.5, "ignore_eos": True, "max_tokens": 100}
AT_A_TIME = 4


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
    pipeline = Pipeline(name="tiny", stages={"only": stage}, limits=Limits(max_requests=AT_A_TIME))
    with open_shared_system(lambda: OmniSystem.open(pipeline), fixture_processes, clear_choices=True) as opened:
        yield opened, model


def prompt(model: Path, kind: str) -> Any:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokens = AutoTokenizer.from_pretrained(model).encode(TEXT)
    table = AutoModelForCausalLM.from_pretrained(model).get_input_embeddings().weight.detach()
    return {"prompt": TEXT, "prompt_token_ids": tokens, "prompt_embeds": table[tokens]}[kind]


def rendered(model: Path, question: str) -> str:
    """Return a question as the chat template renders it: a raw prompt, in which control tokens count."""
    from transformers import AutoTokenizer

    messages = [{"role": "user", "content": question}]
    tokenizer = AutoTokenizer.from_pretrained(model)
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))


async def read(omni: OmniSystem, asked: Any, kill_at: int = 0, **params: Any) -> list[Output]:
    """Return the outputs. SIGKILL the worker when so many are there, and wait until it was restarted."""
    outputs, generation = [], generation_of(omni, "only")
    with trio.fail_after(WATCHDOG_S):
        async for output in omni.generate(asked, **params):
            outputs.append(output)
            if len(outputs) == kill_at:
                os.kill(pid_of(omni, "only"), signal.SIGKILL)
    # The answer may end before the death is noticed.
    await wait_restarted(omni, "only", generation + (kill_at > 0))
    return outputs


async def check_killed(omni: OmniSystem, asked: Any, kills: Iterable[int] = KILL_AT, **params: Any) -> list[Output]:
    """Return the outputs of an undisturbed answer, which are those of each answer with a kill."""
    expected = await read(omni, asked, **params)
    for kill_at in kills:
        replays = 0
        while not replays:  # the worker may have sent everything before its death
            found = await read(omni, asked, kill_at, **params)
            assert [(output.delta, output.data) for output in found] == [(o.delta, o.data) for o in expected]
            assert found[-1].metrics is not None
            replays = found[-1].metrics.replays
        assert replays == 1
    return expected


@pytest.mark.parametrize("kind", ["prompt", "prompt_token_ids", "prompt_embeds"])
def test_an_answer_to_a_raw_prompt_goes_on_after_a_kill(shared_system: tuple[SharedSystem, Path], kind: str) -> None:
    opened, model = shared_system

    async def work(omni: OmniSystem) -> None:
        expected = await check_killed(omni, {kind: prompt(model, kind)}, **SAMPLED)
        assert expected[-1].data["prompt_tokens"] == len(np.atleast_1d(prompt(model, "prompt_token_ids")))

    opened.run(work)


def test_an_answer_keeps_its_structure_after_a_kill(shared_system: tuple[SharedSystem, Path]) -> None:
    opened, _ = shared_system
    params = {"temperature": 1.0, "seed": 3, "max_tokens": 60, "structured_outputs": {"json": FORMED}}

    async def work(omni: OmniSystem) -> None:
        expected = await check_killed(omni, TEXT, **params)
        assert set(json.loads("".join(output.delta or "" for output in expected))) == {"city", "warm"}
        assert expected[-1].data["finish_reason"] == "stop"

    opened.run(work)


@pytest.mark.parametrize(
    "params",
    [{}, pytest.param({"temperature": 1.0, "seed": 3}, marks=pytest.mark.exhaustive)],
    ids=["greedy", "sampled"],
)
def test_a_guided_answer_goes_on_after_a_kill_at_every_tenth_output(
    shared_system: tuple[SharedSystem, Path], params: dict[str, Any]
) -> None:
    """The request and its companion are lost together, and resume together from one journal."""
    opened, model = shared_system
    asked = {"prompt": rendered(model, TEXT)}
    guided = {**GUIDED, "negative_prompt": rendered(model, "the sea")}

    async def work(omni: OmniSystem) -> None:
        expected = await check_killed(omni, asked, (1, *range(10, 60, 10)), **guided, **params)
        assert expected[-1].data["completion_tokens"] == 94  # the context is full
        plain = await read(omni, asked, ignore_eos=True, max_tokens=100, **params)
        assert [output.delta for output in plain] != [output.delta for output in expected]

    opened.run(work)


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_embeddings_are_the_same_after_a_kill(
    shared_system: tuple[SharedSystem, Path], monkeypatch: pytest.MonkeyPatch, pooling: Pooling
) -> None:
    """The worker dies when it has just got a text; others are in its batch, done, or have not begun."""
    opened, _ = shared_system
    texts = [TEXT[: 5 + 3 * number] for number in range(3 * AT_A_TIME)]

    async def work(omni: OmniSystem) -> None:
        expected = await omni.encode(texts, pooling=pooling)
        for kill_at in (1, AT_A_TIME + 2):
            replays = _replays(omni)
            with monkeypatch.context() as patch, trio.fail_after(WATCHDOG_S):
                patch.setattr(omni, "generate", _killing(omni, kill_at))
                found = await omni.encode(texts, pooling=pooling)
            assert _replays(omni) > replays
            for one, other in zip(found, expected, strict=True):
                np.testing.assert_allclose(one.vector, other.vector, atol=1e-5)
                assert one.prompt_tokens == other.prompt_tokens

    opened.run(work)


def _killing(omni: OmniSystem, kill_at: int) -> Callable[..., Generation]:
    """Return ``omni.generate``, but the worker is killed behind request number ``kill_at``."""
    generate, numbers = omni.generate, itertools.count(1)

    def submit(*args: Any, **params: Any) -> Generation:
        generation: Generation = generate(*args, **params)
        if next(numbers) == kill_at:
            os.kill(pid_of(omni, "only"), signal.SIGKILL)
        return generation

    return submit


def _replays(omni: OmniSystem) -> float:
    return omni.metrics.registry.get_sample_value("omni_request_replays_total") or 0.0
