"""The vllm engines under test, in vLLM's own environment: `make test-vllm`. Elsewhere these files are not collected."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from omni_actors.stages import assets
from omni_actors.stages.base import StageContext, StageEngine
from omni_actors.stages.registry import ENGINES
from tests.stages.conftest import drive, shared_engines

__all__ = ["drive", "shared_engines"]

if importlib.util.find_spec("vllm") is None:
    collect_ignore_glob = ["test_*.py"]

ENGINE_ARGS: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "kv_cache_memory_bytes": 1 << 28,
    "max_model_len": 1024,
    "max_num_batched_tokens": 64,
    "max_num_seqs": 8,
}
"""Prompts are prefilled in pieces of 64 tokens."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """vLLM's own warnings fail no test of ours."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("default"))


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The converted checkpoint of SmolLM2-135M-Instruct, in the user's cache."""
    return assets.prepare("smollm2-135m-instruct", print)


@pytest.fixture(scope="session")
def open_stage(smollm2: Path) -> Callable[..., StageEngine]:
    """(engine name, model=SmolLM2, **options) -> a new engine, for the test to close: what a worker does with a stage."""

    def open_engine(name: str, model: Path | None = None, **options: Any) -> StageEngine:
        module, _, factory = ENGINES[name].factory.partition(":")
        if name.startswith("vllm"):
            options = {**options, "engine_args": {**ENGINE_ARGS, **options.get("engine_args", {})}}
        context = StageContext(name, model or smollm2, options, 1, "cpu", lambda note: None)
        engine: StageEngine = getattr(import_module(module), factory)(context)
        return engine

    return open_engine
