"""The hidden states that ``HiddenStateWorker`` captures equal transformers', for every layer and position."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from vllm import EngineArgs, SamplingParams
from vllm.inputs.engine import tokens_input
from vllm.v1.engine.llm_engine import LLMEngine

from omni_actors.stages.vllm import _internals
from tests.support import qwen2_5_reference as reference25
from tests.support import qwen3_reference as reference3
from tests.support.clear_choices import check_lead
from tests.support.vllm_options import ENGINE_ARGS
from tiny_models import vllm as tiny

LAYERS = [0, 1, 2, 3]
"""Layers of a model that has four: transformers returns the last one after the final norm."""
TOKENS = 12
FAMILIES: dict[str, tuple[Any, Any]] = {
    "qwen3": (functools.partial(tiny.qwen3, seed=1), reference3),
    # With the weights' usual spread, 2 of 10304 numbers differ by 0.0002.
    "qwen2_5": (functools.partial(tiny.qwen2_5, seed=1, spread=0.1), reference25),
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("budget", [64, 1024])
def test_hidden_states_of_eight_requests_that_join_at_different_steps(tmp_path: Path, family: str, budget: int) -> None:
    save, reference = FAMILIES[family]
    directory = save(tmp_path)
    random = np.random.default_rng(0)
    prompts = [random.integers(10, 250, length).tolist() for length in (150, 3, 70, 64, 65, 20, 129, 1)]
    arguments = {**ENGINE_ARGS, "max_num_batched_tokens": budget, "async_scheduling": False}
    llm = LLMEngine.from_engine_args(
        EngineArgs(
            model=str(directory),
            worker_cls="omni_actors.stages.vllm._internals.HiddenStateWorker",
            additional_config={"row_layers": LAYERS},
            enable_prefix_caching=False,
            **arguments,
        )
    )
    try:
        tokens, captured, names = _run(llm, prompts)
    finally:
        _internals.close(llm)
    thinker: Any = reference.load(directory).model.thinker
    for number, prompt in enumerate(prompts):
        ids = [*prompt, *tokens[number]][:-1]
        with torch.no_grad():
            expected = thinker(input_ids=torch.tensor([ids]), output_hidden_states=True)
        found = [piece for piece in captured if piece.request == names[number]]
        assert [place for piece in found for place in range(piece.position, piece.position + len(piece))] == list(
            range(len(ids))
        )
        for at, layer in enumerate(LAYERS):
            states = torch.cat([piece.layers[:, at] for piece in found])
            close = {"atol": 0.0, "rtol": 0.0} if layer == 0 else {"atol": 1e-4, "rtol": 1e-3}
            torch.testing.assert_close(states, expected.hidden_states[layer][0], **close)
        last = torch.cat([piece.last for piece in found])
        torch.testing.assert_close(last, expected.hidden_states[-1][0], atol=1e-4, rtol=1e-3)
        logits = expected.logits[0, len(prompt) - 1 :]
        for row in logits:
            check_lead(row)
        assert logits.argmax(-1).tolist() == tokens[number]


def _run(llm: Any, prompts: list[list[int]]) -> tuple[list[list[int]], list[Any], list[str]]:
    """Add a request per step; return the tokens, all captured hidden states, and the requests' ids."""
    sampling: Callable[[], Any] = lambda: SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)  # noqa: E731
    tokens: dict[str, list[int]] = {}
    captured: list[Any] = []
    names: list[str] = []
    while len(names) < len(prompts) or llm.has_unfinished_requests():
        if len(names) < len(prompts):
            names.append(llm.add_request(str(len(names)), tokens_input(prompts[len(names)]), sampling()))
        for output in llm.step():
            tokens[output.request_id] = list(output.outputs[0].token_ids)
        captured += llm.collective_rpc("take_hidden_states")[0]
    return [tokens[str(number)] for number in range(len(prompts))], captured, names
