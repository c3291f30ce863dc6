"""Fixtures of the tests of the vllm engines. `make test-vllm` runs them in vLLM's own environment; elsewhere pytest
does not collect them."""

from __future__ import annotations

import functools
import importlib.util
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from omni_actors.stages import assets
from omni_actors.stages.base import StageContext, StageEngine
from omni_actors.stages.registry import ENGINES
from omni_actors.stages.vllm.factories import prepare_environment
from tests.support.engine_fixtures import clear_choices, drive
from tests.support.vllm_options import ENGINE_ARGS, TEXT_ARGS

__all__ = ["clear_choices", "drive"]

if importlib.util.find_spec("vllm") is None:
    collect_ignore_glob = ["test_*.py"]
else:
    prepare_environment(
        StageContext(stage="tests", model=None, options={}, threads=1, device="cpu", report=lambda note: None)
    )
    with warnings.catch_warnings():  # vLLM's warnings must not fail our tests
        warnings.simplefilter("ignore")
        import_module("omni_actors.stages.vllm._internals")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Ignore the warnings that vLLM causes while it runs."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("default"))


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """Return the converted checkpoint of SmolLM2-135M-Instruct, in the user's cache."""
    return assets.prepare("smollm2-135m-instruct", print)


@pytest.fixture(scope="session")
def open_stage(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., StageEngine]:
    """Return a function (engine name, model=None, **options) -> new engine. The test closes the engine.

    Without ``model`` the engine has SmolLM2, or a tiny thinker with random weights.
    """

    @functools.cache
    def random(family: str) -> Path:
        from tiny_models import vllm as tiny

        directory: Path = getattr(tiny, family)(tmp_path_factory.mktemp(family))
        return directory

    def open_engine(name: str, model: Path | None = None, **options: Any) -> StageEngine:
        module, _, factory = ENGINES[name].factory.partition(":")
        if name.startswith("vllm"):
            given = {**ENGINE_ARGS, **(TEXT_ARGS if name == "vllm" else {}), **options.get("engine_args", {})}
            options = {**options, "engine_args": given}
        if model is None:
            thinker = name.startswith("vllm_") and name.endswith("_thinker")
            model = random(name.removeprefix("vllm_").removesuffix("_thinker")) if thinker else smollm2
        context = StageContext(
            stage=name, model=model, options=options, threads=1, device="cpu", report=lambda note: None
        )
        engine: StageEngine = getattr(import_module(module), factory)(context)
        return engine

    return open_engine


@pytest.fixture(scope="module")
def shared_engines(open_stage: Callable[..., StageEngine]) -> Iterator[Callable[[str], StageEngine]]:
    """Return a function from a name to an engine with default options, opened on first use. A process has one vLLM."""
    opened: dict[bool, tuple[str, ExitStack, StageEngine]] = {}

    def get(name: str) -> StageEngine:
        is_vllm = name.startswith("vllm")
        if is_vllm in opened and opened[is_vllm][0] != name:
            opened.pop(is_vllm)[1].close()
        if is_vllm not in opened:
            stack = ExitStack()
            opened[is_vllm] = (name, stack, stack.enter_context(closing(open_stage(name))))
        return opened[is_vllm][2]

    yield get
    for _, stack, _ in opened.values():
        stack.close()
