"""The cases of echo, and of the engines of the pipeline "voice"."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from tests.support.engine_cases.case import Case, FeedArgs


def echo(_: pytest.FixtureRequest) -> Case:
    def chunks(text: str) -> list[FeedArgs]:
        return [({"text": text, "n": n}, {"x": np.full(n, n, np.float32)}) for n in range(4)]

    def normalise(outputs: list[Any]) -> Any:
        assert [output.data["n"] for output in outputs] == [0, 1, 2, 3]
        return [(dict(o.data), {k: (t.dtype, t.shape, bytes(t.data)) for k, t in o.tensors.items()}) for o in outputs]

    return Case("echo", [chunks("one"), chunks("another")], ({"echo": {"invalid": "feed"}}, {}), normalise)


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

    def normalise(outputs: list[Any]) -> Any:
        assert len(outputs) > 1, "the text is not streamed"
        return "".join(output.data["text"] for output in outputs), outputs[-1].data["duration_s"]

    inputs = [chunks("The capital of France is Paris."), chunks("Seven ships came home.")]
    return Case("whisper", inputs, ({"sample_rate": 24000, "index": 0}, {"audio": np.zeros((2, 9))}), normalise)


def llm(_: pytest.FixtureRequest) -> Case:
    def chunks(question: str) -> list[FeedArgs]:
        parts = ("Answer in one word.", question)
        return [({"messages": [{"role": "user", "content": part}]}, {}) for part in parts]

    def normalise(outputs: list[Any]) -> Any:
        end = outputs[-1].data
        return (
            "".join(output.data.get("text", "") for output in outputs),
            end["finish_reason"],
            end["completion_tokens"],
        )

    inputs = [chunks("What is the capital of France?"), chunks("What colour is the sky?")]
    return Case("llm", inputs, ({"messages": "none"}, {}), normalise, max_tokens=8)


def llm_prefill(request: pytest.FixtureRequest) -> Case:
    inputs = llm(request).inputs

    def normalise(outputs: list[Any]) -> Any:
        sent = [{name: tensor.numpy() for name, tensor in output.downstream.items()} for output in outputs]
        keys, values = (np.concatenate([each[name] for each in sent], axis=2) for name in ("keys", "values"))
        assert keys.shape[2] == outputs[0].data["prompt"]["positions"] == len(sent[0]["tokens"])
        return keys, values, sent[-1]["logits"]

    return Case("llm", inputs, ({"messages": "none"}, {}), normalise, role="prefill")


def llm_decode(request: pytest.FixtureRequest) -> Case:
    shape = request.getfixturevalue("shared_engines")("llm@decode")._shape

    def chunks(seed: int) -> list[FeedArgs]:
        rng, blocks, size = np.random.default_rng(seed), 3, 4

        def states() -> dict[str, np.ndarray[Any, Any]]:
            each = (shape.layers, shape.heads, size, shape.size)
            return {name: rng.normal(0, 1, each).astype(np.float32) for name in ("keys", "values")}

        made: list[FeedArgs] = [({}, states()) for _ in range(blocks)]
        made[0] = ({"prompt": {"positions": blocks * size}}, {**states(), "tokens": np.arange(blocks * size)})
        made[-1][1]["logits"] = rng.normal(0, 1, shape.vocabulary).astype(np.float32)
        return made

    def normalise(outputs: list[Any]) -> Any:
        return "".join(output.data.get("text", "") for output in outputs), outputs[-1].data["completion_tokens"]

    refused = ({"prompt": {"positions": 0}}, {})
    return Case("llm", [chunks(1), chunks(2)], refused, normalise, source="prefill", role="decode", max_tokens=8)


def hibari_acoustic(_: pytest.FixtureRequest) -> Case:
    def chunks(text: str) -> list[FeedArgs]:
        return [({"text": piece}, {}) for piece in (text[:9], text[9:])]

    def normalise(outputs: list[Any]) -> Any:
        places = [(output.data["sentence"], output.data["start"]) for output in outputs]
        assert places == sorted(places)
        return [(dict(output.data), dict(output.tensors)) for output in outputs]

    inputs = [chunks("It is late. Good night."), chunks("Who is there? It is me.")]
    return Case("hibari_acoustic", inputs, ({"text": 5}, {}), normalise, source="thinker")


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

    def normalise(outputs: list[Any]) -> Any:
        sentences = [output.data["sentence"] for output in outputs]
        assert sentences == sorted(sentences)
        audio = np.concatenate([output.tensors["audio"] for output in outputs])
        assert audio.shape == (2 * 6 * 300,)
        return audio

    refused = ({"sentence": 0, "start": 0}, {"lh": np.zeros((601, 3), np.float32)})
    return Case("hibari_vocoder", [chunks(1), chunks(2)], refused, normalise, source="talker")
