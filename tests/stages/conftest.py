"""Engines under test: each opened once a session, and driven as the worker's engine loop drives them."""

from __future__ import annotations

import functools
import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from omni_actors.stages import assets
from omni_actors.stages.base import CLIENT, Chunk, StageContext, StageEngine, StageOutput, StageRequest
from omni_actors.stages.registry import ENGINES
from ringbuf import decode_bundle, encode_bundle

_MODELS = {"whisper": "whisper-tiny.en", "hibari_acoustic": "hibari"}


class Driver:
    """Drives one engine and holds it to the protocol: what it names is live, and ends once.

    Chunks are fed from memory that is taken away when ``feed`` ends: an engine that keeps a view meets a BufferError.
    """

    def __init__(self, engine: StageEngine) -> None:
        self.engine = engine
        self.live: set[int] = set()
        self._seq = 0

    def start(self, request_id: int, sources: tuple[str, ...] = (CLIENT,), **params: Any) -> None:
        self.engine.start(StageRequest(request_id, sources, params))
        self.live.add(request_id)

    def feed(
        self,
        request_id: int,
        data: Mapping[str, Any] | None = None,
        tensors: Mapping[str, Any] | None = None,
        *,
        last: bool = False,
        source: str = CLIENT,
    ) -> None:
        memory = bytearray(b"".join(encode_bundle(None, tensors or {})))
        try:
            with memoryview(memory) as view:
                chunk = Chunk(source, self._seq, last, decode_bundle(view).tensors, data or {})
                self._seq += 1
                self.engine.feed(request_id, chunk)
        finally:
            memory.clear()  # refused while anything looks at it

    def abort(self, request_id: int) -> None:
        self.live.discard(request_id)
        self.engine.abort(request_id)

    def step(self) -> list[Any]:
        """The outputs and failures of one step."""
        assert self.engine.busy
        outputs, written = [], []
        for output in self.engine.step():
            assert output.request_id in self.live, f"request {output.request_id} is not live"
            if not isinstance(output, StageOutput) or output.last:
                self.live.discard(output.request_id)
            outputs.append(output)
            if isinstance(output, StageOutput):
                written.append({name: _bytes(tensor) for name, tensor in for_stages(output).items()})
        kept = [output for output in outputs if isinstance(output, StageOutput)]
        for output, before in zip(kept, written, strict=True):
            assert {name: _bytes(t) for name, t in for_stages(output).items()} == before, "written to after the step"
        return outputs

    def run(self) -> dict[int, list[Any]]:
        """Step while the engine is busy: the outputs of each request, in order."""
        outputs: dict[int, list[Any]] = {}
        while self.engine.busy:
            for output in self.step():
                outputs.setdefault(output.request_id, []).append(output)
        return outputs


def run_chain(
    stages: Mapping[str, Driver], arrivals: Sequence[Callable[[], None]], order: random.Random | None = None
) -> dict[str, dict[int, list[Any]]]:
    """Each stage's outputs by request, where each feeds the next one as the workers' loops would.

    A request that has ended in a stage takes no more there. Each of ``arrivals`` starts one request in all stages and
    feeds the first. order: draws when they come and which stage steps; without it, all come first and step in turn.
    """
    outputs: dict[str, dict[int, list[Any]]] = {name: {} for name in stages}
    below = dict(zip(stages, [*stages.values()][1:], strict=False))
    coming = deque(arrivals)
    try:
        while coming or any(driver.engine.busy for driver in stages.values()):
            working = [name for name, driver in stages.items() if driver.engine.busy]
            if coming and (order is None or not working or order.random() < 0.2):
                coming.popleft()()
                continue
            for name in working if order is None else [order.choice(working)]:
                for output in stages[name].step():
                    outputs[name].setdefault(output.request_id, []).append(output)
                    if name in below and output.request_id in below[name].live:
                        tensors = for_stages(output)
                        below[name].feed(output.request_id, output.data, tensors, last=output.last, source=name)
        assert not any(driver.live for driver in stages.values()), "a request waits for ever"
    finally:
        for driver in stages.values():
            for request_id in list(driver.live):
                driver.abort(request_id)
    return outputs


def for_stages(output: StageOutput) -> dict[str, Any]:
    """What a stage below finds among its chunk's tensors."""
    assert not output.tensors.keys() & output.downstream.keys()
    return {**output.tensors, **output.downstream}


def _bytes(tensor: Any) -> bytes:
    return tensor.tobytes() if isinstance(tensor, np.ndarray) else bytes(tensor.data)


@pytest.fixture(scope="session")
def open_stage(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., StageEngine]:
    """(engine name, model=None, **options) -> a new engine, for the test to close: what a worker does with a stage.

    Without ``model``: the engine's built-in one, or a tiny one with random weights.
    """

    @functools.cache
    def random_llama() -> Path:
        from tests.stages import llama

        return llama.save_model(tmp_path_factory.mktemp("llama"))

    @functools.cache
    def random_qwen3() -> Path:
        from tests.stages.qwen3 import tiny

        return tiny.save(tmp_path_factory.mktemp("qwen3"))

    @functools.cache
    def random_qwen2_5() -> Path:
        from tests.stages.qwen2_5 import tiny

        return tiny.save(tmp_path_factory.mktemp("qwen2_5"))

    def open_engine(name: str, model: Path | None = None, **options: Any) -> StageEngine:
        if model is None and name in _MODELS:
            model = assets.prepare(_MODELS[name], print)
        elif model is None and name == "llm":
            model, options = random_llama(), {"context": 128, **options}
        elif model is None and name.startswith("qwen2_5_"):
            model = random_qwen2_5()
        elif model is None and name.startswith("qwen3_"):
            model = random_qwen3()
        module, _, factory = ENGINES[name].factory.partition(":")
        context = StageContext(name, model, options, 1, "cpu", lambda note: None)
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


@pytest.fixture
def drive(shared_engines: Callable[[str], StageEngine]) -> Iterator[Callable[[str | StageEngine], Driver]]:
    """(engine, or the name of a shared one) -> Driver. Fails a test that leaves a request in an engine."""
    drivers = []

    def new(engine: str | StageEngine) -> Driver:
        drivers.append(Driver(shared_engines(engine) if isinstance(engine, str) else engine))
        return drivers[-1]

    yield new
    left = {request_id for driver in drivers for request_id in driver.live}
    for driver in drivers:
        for request_id in list(driver.live):
            driver.abort(request_id)
    assert not left, f"requests left in the engine: {left}"


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
