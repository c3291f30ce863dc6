"""What ``stages.base`` asks of every engine, asked of every engine."""

from __future__ import annotations

import gc
import itertools
import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import pytest

from omni_actors.stages.base import CLIENT, InvalidRequest
from omni_actors.stages.registry import ENGINES

FeedArgs = tuple[dict[str, Any], dict[str, Any]]
"""data and tensors of a chunk."""


class Case:
    """How to use one engine.

    inputs: two requests, of two chunks at least. refused: a chunk that no request may bring. gist: outputs to what can
    be compared; it also checks what is in them.
    """

    def __init__(
        self,
        name: str,
        inputs: list[list[FeedArgs]],
        refused: FeedArgs,
        gist: Callable[[list[Any]], Any],
        source: str = CLIENT,
        **params: Any,
    ) -> None:
        self.name, self.inputs, self.refused, self.gist = name, inputs, refused, gist
        self.source, self.params = source, params
        self._expected: dict[int, Any] = {}

    def start(self, driver: Any, request_id: int) -> None:
        driver.start(request_id, (self.source,), **self.params)

    def feed(self, driver: Any, request_id: int, which: int, part: slice = slice(None)) -> None:
        chunks = self.inputs[which]
        for i in range(len(chunks))[part]:
            driver.feed(request_id, *chunks[i], last=i == len(chunks) - 1, source=self.source)

    def alone(self, driver: Any, request_id: int, which: int) -> Any:
        """What input number ``which`` gives by itself."""
        self.start(driver, request_id)
        self.feed(driver, request_id, which)
        return self.gist(driver.run()[request_id])

    def check(self, driver: Any, outputs: list[Any], which: int) -> None:
        """They are what input number ``which`` gives by itself."""
        if which not in self._expected:
            self._expected[which] = self.alone(driver, 1000 + which, which)
        np.testing.assert_equal(self.gist(outputs), self._expected[which])


def echo(_: pytest.FixtureRequest) -> Case:
    def chunks(text: str) -> list[FeedArgs]:
        return [({"text": text, "n": n}, {"x": np.full(n, n, np.float32)}) for n in range(4)]

    def gist(outputs: list[Any]) -> Any:
        assert [output.data["n"] for output in outputs] == [0, 1, 2, 3]
        return [(dict(o.data), {k: (t.dtype, t.shape, bytes(t.data)) for k, t in o.tensors.items()}) for o in outputs]

    return Case("echo", [chunks("one"), chunks("another")], ({"echo": {"invalid": "feed"}}, {}), gist)


def whisper(request: pytest.FixtureRequest) -> Case:
    """Its encoder, which takes all the time, is a function of its input: it is asked once for each."""
    speak = request.getfixturevalue("speak")
    model = request.getfixturevalue("shared_engines")("whisper")._model
    encode, encoded = model.encode, dict[bytes, Any]()

    def encode_once(features: np.ndarray[Any, Any]) -> Any:
        key = features.tobytes()
        if key not in encoded:
            encoded[key] = encode(features)
            if len(encoded) == 2:  # so it is: the first input once more, after another
                first = np.frombuffer(next(iter(encoded)), features.dtype).reshape(features.shape).copy()
                np.testing.assert_array_equal(np.array(encode(first)), np.array(next(iter(encoded.values()))))
        return encoded[key]

    model.encode = encode_once
    request.addfinalizer(lambda: delattr(model, "encode"))  # the class has its own

    def chunks(text: str) -> list[FeedArgs]:
        data = {"sample_rate": 24000, "index": 0}
        return [(data, {"audio": piece}) for piece in np.array_split(speak(text), 3)]

    def gist(outputs: list[Any]) -> Any:
        assert len(outputs) > 1, "the text does not come as it is heard"
        return "".join(output.data["text"] for output in outputs), outputs[-1].data["duration_s"]

    inputs = [chunks("The capital of France is Paris."), chunks("Seven ships came home.")]
    return Case("whisper", inputs, ({"sample_rate": 24000, "index": 0}, {"audio": np.zeros((2, 9))}), gist)


def llm(_: pytest.FixtureRequest) -> Case:
    def chunks(question: str) -> list[FeedArgs]:
        parts = ("Answer in one word.", question)
        return [({"messages": [{"role": "user", "content": part}]}, {}) for part in parts]

    def gist(outputs: list[Any]) -> Any:
        end = outputs[-1].data
        return (
            "".join(output.data.get("text", "") for output in outputs),
            end["finish_reason"],
            end["completion_tokens"],
        )

    inputs = [chunks("What is the capital of France?"), chunks("What colour is the sky?")]
    return Case("llm", inputs, ({"messages": "none"}, {}), gist, max_tokens=8)


def hibari_acoustic(_: pytest.FixtureRequest) -> Case:
    def chunks(text: str) -> list[FeedArgs]:
        return [({"text": piece}, {}) for piece in (text[:9], text[9:])]

    def gist(outputs: list[Any]) -> Any:
        places = [(output.data["sentence"], output.data["start"]) for output in outputs]
        assert places == sorted(places)
        return [(dict(output.data), dict(output.tensors)) for output in outputs]

    inputs = [chunks("It is late. Good night."), chunks("Who is there? It is me.")]
    return Case("hibari_acoustic", inputs, ({"text": 5}, {}), gist, source="thinker")


def hibari_vocoder(_: pytest.FixtureRequest) -> Case:
    def chunks(seed: int) -> list[FeedArgs]:
        rng = np.random.default_rng(seed)
        made: list[FeedArgs] = []
        for sentence, start in itertools.product(range(2), (0, 3)):
            tensors = {n: rng.normal(-3, 1, (601, 3)).astype(np.float32) for n in ("lh", "theta", "ln", "lr", "phi")}
            if start == 0:
                tensors["f0"] = rng.uniform(20, 300, 6).astype(np.float32)
            made.append(({"sentence": sentence, "start": start}, tensors))
        return made

    def gist(outputs: list[Any]) -> Any:
        sentences = [output.data["sentence"] for output in outputs]
        assert sentences == sorted(sentences)
        audio = np.concatenate([output.tensors["audio"] for output in outputs])
        assert audio.shape == (2 * 6 * 300,)
        return audio

    refused = ({"sentence": 0, "start": 0}, {"lh": np.zeros((601, 3), np.float32)})
    return Case("hibari_vocoder", [chunks(1), chunks(2)], refused, gist, source="talker")


def qwen3_code2wav(_: pytest.FixtureRequest) -> Case:
    def chunks(seed: int) -> list[FeedArgs]:
        frames = np.random.default_rng(seed).integers(0, 64, (9, 4), dtype=np.int16)
        return [({}, {"codes": frames[at : at + 3]}) for at in (0, 3, 6)]

    def gist(outputs: list[Any]) -> Any:
        audio = np.concatenate([output.tensors["audio"] for output in outputs if output.tensors])
        assert audio.shape == (9 * 1920 - 555,)
        return audio

    return Case("qwen3_code2wav", [chunks(1), chunks(2)], ({}, {"codes": np.zeros((1, 3), np.int16)}), gist, "talker")


def shown(seed: int) -> list[FeedArgs]:
    """A picture and a question about it."""
    image = np.random.default_rng(seed).integers(0, 255, (64, 64, 3), np.uint8)
    words = [{"type": "image", "index": 0}, {"type": "text", "text": "what is it ?"}]
    return [({"index": 0}, {"image": image}), ({"messages": [{"role": "user", "content": words}]}, {})]


def qwen3_thinker(_: pytest.FixtureRequest) -> Case:
    def gist(outputs: list[Any]) -> Any:
        rows = np.concatenate([o.downstream["rows"].numpy() for o in outputs if "rows" in o.downstream])
        end = outputs[-1].data
        assert len(rows) == len(outputs[0].downstream["ids"].numpy()) + end["completion_tokens"] - 1
        return "".join(output.data.get("text", "") for output in outputs), end["finish_reason"], rows.round(3) + 0.0

    return Case("qwen3_thinker", [shown(1), shown(2)], ({"messages": "none"}, {}), gist, max_tokens=6)


def qwen3_talker(_: pytest.FixtureRequest) -> Case:
    def chunks(seed: int) -> list[FeedArgs]:
        prompt, answer = np.random.default_rng(seed).normal(0, 1, (2, 9, 64)).astype(np.float32)
        once = {"ids": np.arange(9), "heard": np.arange(9) == 2, "tts": prompt[:3]}
        return [({}, {**once, "rows": prompt[:5]}), ({}, {"rows": prompt[5:]}), ({}, {"rows": answer})]

    def gist(outputs: list[Any]) -> Any:
        codes = np.concatenate([np.zeros((0, 4), np.int16), *(o.tensors["codes"] for o in outputs if o.tensors)])
        assert len(codes) <= 7
        return codes

    params = {"talker_max_tokens": 8, "seed": 0}
    refused = ({}, {"rows": np.zeros((1, 63), np.float32)})
    return Case("qwen3_talker", [chunks(1), chunks(2)], refused, gist, "thinker", **params)


def qwen2_5_thinker(_: pytest.FixtureRequest) -> Case:
    def gist(outputs: list[Any]) -> Any:
        rows = np.concatenate([o.downstream["rows"].numpy() for o in outputs if "rows" in o.downstream])
        end = outputs[-1].data
        assert rows.shape == (end["prompt_tokens"] + end["completion_tokens"] - 1, 64)
        return "".join(output.data.get("text", "") for output in outputs), end["finish_reason"], rows.round(3) + 0.0

    return Case("qwen2_5_thinker", [shown(1), shown(2)], ({"messages": "none"}, {}), gist, max_tokens=6)


def qwen2_5_talker(_: pytest.FixtureRequest) -> Case:
    def chunks(seed: int) -> list[FeedArgs]:
        rng = np.random.default_rng(seed)
        prompt, answer = rng.normal(0, 1, (2, 9, 64)).astype(np.float32)
        places = np.arange(9)
        once = {"ids": places, "positions": places[None].repeat(3, 0), "tts": prompt[:4]}
        return [({}, {**once, "rows": prompt[:5]}), ({}, {"rows": prompt[5:]}), ({}, {"rows": answer})]

    def gist(outputs: list[Any]) -> Any:
        codes = np.concatenate([output.tensors["codes"] for output in outputs if output.tensors])
        assert 0 < len(codes) <= 12
        return codes

    params = {"talker_max_tokens": 12, "seed": 0}
    refused = ({}, {"rows": np.zeros((1, 63), np.float32)})
    return Case("qwen2_5_talker", [chunks(1), chunks(2)], refused, gist, "thinker", **params)


def qwen2_5_token2wav(_: pytest.FixtureRequest) -> Case:
    def chunks(seed: int) -> list[FeedArgs]:
        codes = np.random.default_rng(seed).integers(0, 64, (26, 1), dtype=np.int16)
        return [({}, {"codes": codes[at : at + 13]}) for at in (0, 13)]

    def gist(outputs: list[Any]) -> Any:
        audio = np.concatenate([output.tensors["audio"] for output in outputs])
        assert audio.shape == (26 * 480,)
        return audio

    refused = ({}, {"codes": np.zeros((1, 2), np.int16)})
    return Case("qwen2_5_token2wav", [chunks(1), chunks(2)], refused, gist, "talker", seed=0)


VOICE = (
    whisper,
    llm,
    hibari_acoustic,
    hibari_vocoder,
    qwen3_thinker,
    qwen3_talker,
    qwen3_code2wav,
    qwen2_5_thinker,
    qwen2_5_talker,
    qwen2_5_token2wav,
)


@pytest.fixture(
    scope="module", params=[echo, *(pytest.param(f, marks=pytest.mark.voice, id=f.__name__) for f in VOICE)]
)
def case(request: pytest.FixtureRequest) -> Case:
    made: Case = request.param(request)
    return made


@pytest.fixture
def driver(case: Case, drive: Callable[..., Any]) -> Any:
    return drive(case.name)


def test_a_request_gives_its_outputs_and_exactly_one_last(case: Case, driver: Any) -> None:
    case.start(driver, 1)
    case.feed(driver, 1, 0)
    outputs = driver.run()
    assert outputs.keys() == {1}
    assert [output.last for output in outputs[1]].count(True) == 1
    assert outputs[1][-1].last
    assert not driver.live


def test_an_engine_without_work_is_not_busy(case: Case, driver: Any) -> None:
    assert not driver.engine.busy
    case.start(driver, 1)
    assert not driver.engine.busy, "busy with a request that has no input yet"
    case.feed(driver, 1, 0)
    assert driver.engine.busy
    driver.run()
    assert not driver.engine.busy


def test_requests_side_by_side_give_what_each_gives_alone(case: Case, driver: Any) -> None:
    for number in (0, 1):
        case.start(driver, 10 + number)
    for i in range(max(map(len, case.inputs))):
        for number in (0, 1):
            case.feed(driver, 10 + number, number, slice(i, i + 1))
    outputs = driver.run()
    assert outputs.keys() == {10, 11}
    for number in (0, 1):
        case.check(driver, outputs[10 + number], number)


def test_a_request_that_joins_between_steps_gives_what_it_gives_alone(case: Case, driver: Any) -> None:
    case.start(driver, 10)
    case.feed(driver, 10, 0)
    outputs = {10: driver.step(), 11: []}
    case.start(driver, 11)
    case.feed(driver, 11, 1)
    for request_id, more in driver.run().items():
        outputs[request_id] += more
    for number in (0, 1):
        case.check(driver, outputs[10 + number], number)


def test_an_id_can_be_used_again_after_its_end(case: Case, driver: Any) -> None:
    for _ in range(2):
        case.start(driver, 1)
        case.feed(driver, 1, 0)
        case.check(driver, driver.run()[1], 0)


def test_an_engine_that_replays_gives_the_same_chunks_whatever_the_timing(case: Case, driver: Any) -> None:
    """A consumer goes on, in a replay, with the chunk that follows the last one it has: each is to be the same."""
    assert ENGINES[case.name].replays, "then leave it out here"

    def at_once() -> list[Any]:
        case.start(driver, 1)
        case.feed(driver, 1, 0)
        return driver.run()[1]

    def as_slowly_as_can_be() -> list[Any]:
        outputs: list[Any] = []
        case.start(driver, 1)
        for i in range(len(case.inputs[0])):
            case.feed(driver, 1, 0, slice(i, i + 1))
            outputs += driver.run().get(1, [])
        return outputs

    def beside_another() -> list[Any]:
        case.start(driver, 2)
        case.feed(driver, 2, 1)
        return at_once()

    expected = _chunks(at_once())
    for timing in (as_slowly_as_can_be, beside_another):
        assert _chunks(timing()) == expected, timing.__name__


@pytest.mark.parametrize("state", ["started", "half fed", "half fed and stepped", "fed", "stepped"])
def test_abort_frees_a_request_in_every_state(case: Case, driver: Any, state: str) -> None:
    case.start(driver, 2)
    if state.startswith("half fed"):
        case.feed(driver, 2, 0, slice(0, 1))
        if "stepped" in state:
            driver.run()
    elif state != "started":
        case.feed(driver, 2, 0)
        if state == "stepped":
            assert not any(output.last for output in driver.step())
    case.start(driver, 3)
    case.feed(driver, 3, 1)
    driver.abort(2)
    outputs = driver.run()
    assert outputs.keys() == {3}
    case.check(driver, outputs[3], 1)
    assert not driver.engine.busy
    case.start(driver, 2)
    driver.abort(2)


@pytest.mark.parametrize("fed_before", [0, 1])
def test_a_bad_chunk_refuses_its_own_request_only(case: Case, driver: Any, fed_before: int) -> None:
    case.start(driver, 2)
    case.start(driver, 3)
    case.feed(driver, 2, 0, slice(0, fed_before))
    case.feed(driver, 3, 1, slice(0, 1))
    with pytest.raises(InvalidRequest) as refusal:
        driver.feed(2, *case.refused, last=True, source=case.source)
    assert refusal.value.param
    driver.abort(2)  # as the worker does: it may come too late for anything
    case.feed(driver, 3, 1, slice(1, None))
    outputs = driver.run()
    assert outputs.keys() == {3}
    case.check(driver, outputs[3], 1)
    case.start(driver, 2)
    driver.abort(2)


def test_nothing_is_kept_of_a_request_that_has_ended(case: Case, driver: Any) -> None:
    def one_of_each_end(request_id: int) -> None:
        case.alone(driver, request_id, 0)
        case.start(driver, request_id + 1)
        with pytest.raises(InvalidRequest):
            driver.feed(request_id + 1, *case.refused, last=True, source=case.source)
        driver.live.discard(request_id + 1)
        case.start(driver, request_id + 2)
        case.feed(driver, request_id + 2, 0)
        driver.abort(request_id + 2)

    one_of_each_end(10)  # what is loaded by a first request stays
    before = reachable(driver.engine)
    one_of_each_end(20)
    assert reachable(driver.engine) == before


def test_close_ends_the_engines_threads(case: Case, driver: Any, open_stage: Callable[..., Any], drive: Any) -> None:
    case.alone(driver, 1, 0)  # threads that a library starts once, for good, are running now
    before = _tasks()
    engine = open_stage(case.name)
    case.alone(drive(engine), 1, 0)
    engine.close()
    del engine
    give_up = time.monotonic() + 60
    while left := _tasks() - before:
        assert time.monotonic() < give_up, f"threads left: {left}; of Python: {threading.enumerate()}"
        time.sleep(0.01)


def reachable(engine: Any) -> Counter[str]:
    """How many objects of each type the engine holds, directly or not; code and modules aside.

    A whole number counts as often as it is held: whether it is an object of its own depends on its value. What a reader
    beside the steps is at comes to its end first: the abort of a request does not stop it.
    """
    if reader := getattr(engine, "_reader", None):
        reader.submit(int).result()
    numbers, seen = 0, dict[int, Any]()
    found = [engine]
    while found:
        thing = found.pop()
        if isinstance(thing, int):
            numbers += 1
        elif id(thing) not in seen and not isinstance(thing, (type, ModuleType, FunctionType)):
            seen[id(thing)] = thing
            found += gc.get_referents(thing)
    return Counter(type(thing).__name__ for thing in seen.values()) + Counter(int=numbers)


def _chunks(outputs: list[Any]) -> list[Any]:
    """What a consumer gets of outputs, chunk by chunk, to be compared exactly."""
    return [(dict(o.data), {name: _frozen(t) for name, t in o.tensors.items()}, o.last) for o in outputs]


def _frozen(tensor: Any) -> Any:
    return (str(tensor.dtype), tensor.shape, tensor.tobytes() if isinstance(tensor, np.ndarray) else bytes(tensor.data))


def _tasks() -> set[str]:
    """This process's threads, native ones too."""
    return set(os.listdir("/proc/self/task"))
