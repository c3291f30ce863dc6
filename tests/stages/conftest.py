"""Engines under test: each opened once a session, and driven as the worker's engine loop drives them."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from omni_actors.stages import assets
from omni_actors.stages.base import StageEngine
from omni_actors.stages.registry import ENGINES
from tests.support.engine_cases import EVERY_ENGINE, Case
from tests.support.engine_driver import Driver
from tests.support.engine_fixtures import clear_choices, drive, lenient_choices
from tests.support.stage_context import stage_context

__all__ = ["clear_choices", "drive", "lenient_choices"]

THREADS = int(os.environ.get("OMNI_ACTORS_TEST_THREADS", "1"))
"""Threads of each engine; `make test-portable` varies them."""
_MODELS = {"whisper": "whisper-tiny.en", "hibari_acoustic": "hibari"}


class OpenedBy(NamedTuple):
    """What a stage is opened with. engine: its name in the registry."""

    engine: str
    model: Path | None
    options: dict[str, Any]


@pytest.fixture(scope="session")
def opened_by(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., OpenedBy]:
    """(engine name, model=None, **options) -> with what its engine is opened.

    The name may have an option: "llm@prefill" is ``llm`` with this role, and prompts in several steps.
    Without ``model``: the engine's built-in one, or a tiny one with random weights and options that cost little.
    """

    @functools.cache
    def random_llama() -> Path:
        from tiny_models import llama

        return llama.save_model(tmp_path_factory.mktemp("llama"))

    @functools.cache
    def random_qwen3() -> Path:
        from tiny_models import qwen3 as tiny

        return tiny.save(tmp_path_factory.mktemp("qwen3"))

    @functools.cache
    def random_qwen2_5() -> Path:
        from tiny_models import qwen2_5 as tiny

        return tiny.save(tmp_path_factory.mktemp("qwen2_5"))

    @functools.cache
    def random_qwen_image(kind: str) -> Path:
        from tiny_models import qwen_image as tiny

        directory = tmp_path_factory.mktemp("qwen_image")
        return tiny.save(directory) if kind == "text" else tiny.save_edit(directory, plus=kind == "edit plus")

    @functools.cache
    def random_diffusers() -> Path:
        from tiny_models import diffusers_pipelines as tiny

        return tiny.save(tmp_path_factory.mktemp("diffusers"))

    @functools.cache
    def random_bagel() -> Path:
        from tiny_models import bagel as tiny

        return tiny.save(tmp_path_factory.mktemp("bagel"))

    def opened(name: str, model: Path | None = None, **options: Any) -> OpenedBy:
        name, _, role = name.partition("@")
        options = {"role": role, "prefill_chunk": 8, **options} if role else options
        if model is None and name in _MODELS:
            model = assets.prepare(_MODELS[name], print)
        elif model is None and name == "llm":
            model, options = random_llama(), {"context": 128, **options}
        elif model is None and name == "qwen2_5_token2wav":
            model, options = random_qwen2_5(), {"steps": 2, **options}
        elif model is None and name.startswith("qwen2_5_"):
            model = random_qwen2_5()
        elif model is None and name.startswith("qwen3_"):
            model = random_qwen3()
        elif model is None and name == "qwen_image_vae_encoder":
            model, options = random_qwen_image("edit plus"), {"image_area": 64 * 64, **options}
        elif model is None and name.startswith("qwen_image_"):
            model = random_qwen_image("text")
        elif model is None and name == "diffusers":
            model = random_diffusers()
        elif model is None and name.startswith("bagel"):
            model = random_bagel()
        return OpenedBy(name, model, options)

    return opened


@pytest.fixture(scope="session")
def open_stage(opened_by: Callable[..., OpenedBy]) -> Callable[..., StageEngine]:
    """(what ``opened_by`` takes) -> a new engine, for the test to close: what a worker does with a stage."""

    def open_engine(name: str, model: Path | None = None, **options: Any) -> StageEngine:
        name, model, options = opened_by(name, model, **options)
        module, _, factory = ENGINES[name].factory.partition(":")
        context = stage_context(options, stage=name, model=model, threads=THREADS)
        engine: StageEngine = getattr(import_module(module), factory)(context)
        return engine

    return open_engine


@pytest.fixture(scope="session")
def shared_engines(open_stage: Callable[..., StageEngine]) -> Iterator[Callable[[str], StageEngine]]:
    """Name -> an engine of default options, opened when it is first asked for. A test leaves it idle."""
    opened: dict[str, StageEngine] = {}
    with ExitStack() as stack:

        def get(name: str) -> StageEngine:
            if name not in opened:
                opened[name] = stack.enter_context(closing(open_stage(name)))
            return opened[name]

        yield get


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The converted checkpoint of SmolLM2-135M-Instruct, in the user's cache."""
    return assets.prepare("smollm2-135m-instruct", print)


@pytest.fixture(scope="session")
def speak() -> Callable[[str], np.ndarray[Any, Any]]:
    """Text -> speech, float32 (n,) at 24 kHz, by hibari itself: the same every time, and to be left as it is."""
    from hibari import Hibari

    voice = Hibari(threads=1)
    return functools.cache(lambda text: voice(text, seed=0))


@pytest.fixture(scope="module", params=EVERY_ENGINE)
def case(request: pytest.FixtureRequest) -> Case:
    """Each engine in turn."""
    made: Case = request.param(request)
    return made


@pytest.fixture
def driver(case: Case, drive: Callable[..., Driver]) -> Driver:
    """Drives the shared engine of the case."""
    return drive(case.opened)
