"""How to use each engine: the cases of the conformance suite and of the tests of hostile requests."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from omni_actors.stages.base import CLIENT
from tests.support.closeness import assert_same_results

FeedArgs = tuple[dict[str, Any], dict[str, Any]]
"""data and tensors of a chunk."""


class Case:
    """How to use one engine.

    inputs: two requests, of two chunks at least. refused: a chunk that no request may bring.
    normalise: checks outputs, and joins them into a value that does not depend on how they were cut into chunks.
    """

    def __init__(
        self,
        name: str,
        inputs: list[list[FeedArgs]],
        refused: FeedArgs,
        normalise: Callable[[list[Any]], Any],
        source: str = CLIENT,
        **params: Any,
    ) -> None:
        self.name, self.inputs, self.refused, self.normalise = name, inputs, refused, normalise
        self.source, self.params = source, params
        self._expected: dict[int, list[Any]] = {}

    def start(self, driver: Any, request_id: int, **resumption: Any) -> None:
        """resumption: ``journal`` and ``needed_from``."""
        driver.start(request_id, (self.source,), **resumption, **self.params)

    def feed(self, driver: Any, request_id: int, which: int, part: slice = slice(None)) -> None:
        chunks = self.inputs[which]
        for i in range(len(chunks))[part]:
            driver.feed(request_id, *chunks[i], last=i == len(chunks) - 1, source=self.source)

    def alone(self, driver: Any, request_id: int, which: int) -> list[Any]:
        """The outputs of input number ``which`` by itself."""
        self.start(driver, request_id)
        self.feed(driver, request_id, which)
        outputs: list[Any] = driver.run()[request_id]
        return outputs

    def outputs(self, driver: Any, which: int) -> list[Any]:
        """As ``alone``, computed once."""
        if which not in self._expected:
            self._expected[which] = self.alone(driver, 1000 + which, which)
        return self._expected[which]

    def check(self, driver: Any, outputs: list[Any], which: int) -> None:
        """They are what input number ``which`` gives by itself."""
        assert_same_results(self.normalise(outputs), self.normalise(self.outputs(driver, which)))


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


def qwen3_code2wav(_: pytest.FixtureRequest) -> Case:
    def chunks(seed: int) -> list[FeedArgs]:
        frames = np.random.default_rng(seed).integers(0, 64, (9, 4), dtype=np.int16)
        return [({}, {"codes": frames[at : at + 3]}) for at in (0, 3, 6)]

    def normalise(outputs: list[Any]) -> Any:
        audio = np.concatenate([output.tensors["audio"] for output in outputs if output.tensors])
        assert audio.shape == (9 * 1920 - 555,)
        return audio

    return Case(
        name="qwen3_code2wav",
        inputs=[chunks(1), chunks(2)],
        refused=({}, {"codes": np.zeros((1, 3), np.int16)}),
        normalise=normalise,
        source="talker",
    )


def shown(seed: int) -> list[FeedArgs]:
    """A picture and a question about it."""
    image = np.random.default_rng(seed).integers(0, 255, (64, 64, 3), np.uint8)
    words = [{"type": "image", "index": 0}, {"type": "text", "text": "what is it ?"}]
    return [({"index": 0}, {"image": image}), ({"messages": [{"role": "user", "content": words}]}, {})]


def qwen3_thinker(_: pytest.FixtureRequest) -> Case:
    def normalise(outputs: list[Any]) -> Any:
        rows = np.concatenate([o.downstream["rows"].numpy() for o in outputs if "rows" in o.downstream])
        end = outputs[-1].data
        assert len(rows) == len(outputs[0].downstream["ids"].numpy()) + end["completion_tokens"] - 1
        return "".join(output.data.get("text", "") for output in outputs), end["finish_reason"], rows

    return Case("qwen3_thinker", [shown(1), shown(2)], ({"messages": "none"}, {}), normalise, max_tokens=6)


def qwen3_talker(_: pytest.FixtureRequest) -> Case:
    def chunks(seed: int) -> list[FeedArgs]:
        prompt, answer = np.random.default_rng(seed).normal(0, 1, (2, 9, 64)).astype(np.float32)
        once = {"ids": np.arange(9), "is_media": np.arange(9) == 2, "tts": prompt[:3]}
        return [({}, {**once, "rows": prompt[:5]}), ({}, {"rows": prompt[5:]}), ({}, {"rows": answer})]

    def normalise(outputs: list[Any]) -> Any:
        codes = np.concatenate([np.zeros((0, 4), np.int16), *(o.tensors["codes"] for o in outputs if o.tensors)])
        assert len(codes) <= 7
        return codes

    params = {"talker_max_tokens": 8, "seed": 0}
    refused = ({}, {"rows": np.zeros((1, 63), np.float32)})
    return Case(
        name="qwen3_talker",
        inputs=[chunks(1), chunks(2)],
        refused=refused,
        normalise=normalise,
        source="thinker",
        **params,
    )


def qwen2_5_thinker(_: pytest.FixtureRequest) -> Case:
    def normalise(outputs: list[Any]) -> Any:
        rows = np.concatenate([o.downstream["rows"].numpy() for o in outputs if "rows" in o.downstream])
        end = outputs[-1].data
        assert rows.shape == (end["prompt_tokens"] + end["completion_tokens"] - 1, 64)
        return "".join(output.data.get("text", "") for output in outputs), end["finish_reason"], rows

    return Case("qwen2_5_thinker", [shown(1), shown(2)], ({"messages": "none"}, {}), normalise, max_tokens=6)


def qwen2_5_talker(_: pytest.FixtureRequest) -> Case:
    def chunks(seed: int) -> list[FeedArgs]:
        rng = np.random.default_rng(seed)
        prompt, answer = rng.normal(0, 1, (2, 9, 64)).astype(np.float32)
        places = np.arange(9)
        once = {"ids": places, "positions": places[None].repeat(3, 0), "tts": prompt[:4]}
        return [({}, {**once, "rows": prompt[:5]}), ({}, {"rows": prompt[5:]}), ({}, {"rows": answer})]

    def normalise(outputs: list[Any]) -> Any:
        codes = np.concatenate([output.tensors["codes"] for output in outputs if output.tensors])
        assert 0 < len(codes) <= 12
        return codes

    params = {"talker_max_tokens": 12, "seed": 0}
    refused = ({}, {"rows": np.zeros((1, 63), np.float32)})
    return Case(
        name="qwen2_5_talker",
        inputs=[chunks(1), chunks(2)],
        refused=refused,
        normalise=normalise,
        source="thinker",
        **params,
    )


def qwen2_5_token2wav(_: pytest.FixtureRequest) -> Case:
    def chunks(seed: int) -> list[FeedArgs]:
        codes = np.random.default_rng(seed).integers(0, 64, (26, 1), dtype=np.int16)
        return [({}, {"codes": codes[at : at + 13]}) for at in (0, 13)]

    def normalise(outputs: list[Any]) -> Any:
        audio = np.concatenate([output.tensors["audio"] for output in outputs])
        assert audio.shape == (26 * 480,)
        return audio

    refused = ({}, {"codes": np.zeros((1, 2), np.int16)})
    return Case(
        name="qwen2_5_token2wav",
        inputs=[chunks(1), chunks(2)],
        refused=refused,
        normalise=normalise,
        source="talker",
        seed=0,
    )


def qwen_image_denoiser(_: pytest.FixtureRequest) -> Case:
    def chunks(seed: int) -> list[FeedArgs]:
        rng = np.random.default_rng(seed)
        shapes = {"latents": (4, 8, 8), "prompt": (5 + seed, 32), "negative": (4, 32)}
        drawn = {name: rng.normal(0, 1, shape).astype(np.float32) for name, shape in shapes.items()}
        return [({}, {"latents": drawn.pop("latents")}), ({}, drawn)]

    def normalise(outputs: list[Any]) -> Any:
        assert [output.data["step"] for output in outputs] == [2, 4, 5]
        return [(dict(output.data), dict(output.tensors)) for output in outputs]

    return Case(
        name="qwen_image_denoiser",
        inputs=[chunks(1), chunks(2)],
        refused=({}, {"prompt": np.zeros((1, 31), np.float32)}),
        normalise=normalise,
        source="text_encoder",
        steps=5,
        strength=1.0,
        previews=2,
        seed=0,
    )


def qwen_image_text_encoder(_: pytest.FixtureRequest) -> Case:
    def chunks(prompt: str) -> list[FeedArgs]:
        return [({"messages": [{"role": "user", "content": part}]}, {}) for part in ("hello", prompt)]

    def normalise(outputs: list[Any]) -> Any:
        [output] = outputs
        assert output.tensors.keys() == {"prompt", "negative"}
        return {name: tensor.numpy() for name, tensor in output.tensors.items()}

    return Case(
        name="qwen_image_text_encoder",
        inputs=[chunks("a red fox"), chunks("the sea at night")],
        refused=({"messages": "none"}, {}),
        normalise=normalise,
        negative_prompt="grey",
    )


def qwen_image_vae_encoder(_: pytest.FixtureRequest) -> Case:
    def chunks(seed: int) -> list[FeedArgs]:
        images = np.random.default_rng(seed).integers(0, 255, (2, 40, 60, 3), np.uint8)
        return [({"index": index}, {"image": image}) for index, image in enumerate(images)]

    def normalise(outputs: list[Any]) -> Any:
        [output] = outputs
        assert output.tensors.keys() == {"latents.0", "latents.1"}
        return {name: tensor.numpy() for name, tensor in output.tensors.items()}

    refused = ({"index": 5}, {"image": np.zeros((2, 9), np.uint8)})
    return Case("qwen_image_vae_encoder", [chunks(1), chunks(2)], refused, normalise)


def qwen_image_vae_decoder(_: pytest.FixtureRequest) -> Case:
    def chunks(seed: int) -> list[FeedArgs]:
        latents = np.random.default_rng(seed).normal(0, 1, (3, 4, 8, 12)).astype(np.float32)
        return [
            ({"step": step, "total": 3, "final": step == 3, "width": 48, "height": 32}, {"latents": latents[step - 1]})
            for step in (1, 2, 3)
        ]

    def normalise(outputs: list[Any]) -> Any:
        assert [output.data for output in outputs] == [{"step": n, "total": 3, "final": n == 3} for n in (1, 2, 3)]
        return [output.tensors["image"].astype(np.float32) for output in outputs]

    data = {"step": 3, "total": 3, "final": True, "width": 48, "height": 32}
    refused = (data, {"latents": np.zeros((3, 8, 12), np.float32)})
    return Case("qwen_image_vae_decoder", [chunks(1), chunks(2)], refused, normalise, source="denoiser")


def diffusers(_: pytest.FixtureRequest) -> Case:
    def chunks(prompt: str) -> list[FeedArgs]:
        conversation = [{"role": "system", "content": "Draw."}, {"role": "user", "content": prompt}]
        return [({"messages": [message]}, {}) for message in conversation]

    def normalise(outputs: list[Any]) -> Any:
        assert [output.data["step"] for output in outputs] == [2, 3]
        assert all(output.tensors["image"].shape == (16, 24, 3) for output in outputs)
        return [(dict(output.data), dict(output.tensors)) for output in outputs]

    return Case(
        name="diffusers",
        inputs=[chunks("a cat"), chunks("a tall ship")],
        refused=({"messages": "none"}, {}),
        normalise=normalise,
        size="24x16",
        steps=3,
        guidance=3.0,
        previews=2,
        seed=0,
    )


def bagel_context(_: pytest.FixtureRequest) -> Case:
    """A text, and then the context of a picture."""

    def normalise(outputs: list[Any]) -> Any:
        layers = [output.downstream for output in outputs if output.downstream]
        assert len(layers) == 3
        assert layers[0]["noise"].shape == (16, 16)
        keys = [{name: tensor.numpy() for name, tensor in layer.items()} for layer in layers]
        return "".join(output.data.get("text", "") for output in outputs), keys

    return Case(
        name="bagel_context",
        inputs=[shown(1), shown(2)],
        refused=({"messages": "none"}, {}),
        normalise=normalise,
        think=True,
        max_tokens=6,
        size="32x32",
        seed=0,
    )


def bagel_denoiser(_: pytest.FixtureRequest) -> Case:
    def chunks(seed: int) -> list[FeedArgs]:
        rng = np.random.default_rng(seed)
        drawn = rng.normal(0, 1, (3, 2, 2, 7 + seed, 16)).astype(np.float32)
        fed: list[FeedArgs] = [({}, {"keys": keys, "values": values}) for keys, values in drawn]
        mark = {"length": 7 + seed, "position": 7}
        header = {"layers": 3, "full": mark, "imageless": mark, "textless": {"length": 2, "position": 2}}
        header |= {"edits": False, "width": 32, "height": 32}
        noise = {"noise": rng.normal(0, 1, (16, 16)).astype(np.float32)}
        return [({"context": header}, {**fed[0][1], **noise}), *fed[1:]]

    return Case(
        name="bagel_denoiser",
        inputs=[chunks(1), chunks(2)],
        refused=({}, {"keys": np.zeros((2, 3, 16), np.float32), "values": np.zeros((2, 3, 15), np.float32)}),
        normalise=_pictures_of_steps_2_4_5,
        source="context",
        steps=5,
        previews=2,
    )


def bagel(_: pytest.FixtureRequest) -> Case:
    return Case(
        name="bagel",
        inputs=[shown(1), shown(2)],
        refused=({"messages": "none"}, {}),
        normalise=_pictures_of_steps_2_4_5,
        size="32x32",
        steps=5,
        previews=2,
        seed=0,
    )


def _pictures_of_steps_2_4_5(outputs: list[Any]) -> Any:
    assert [(output.data["step"], output.last) for output in outputs] == [(2, False), (4, False), (5, True)]
    return [dict(output.tensors) for output in outputs]


EVERY_ENGINE = [
    pytest.param(echo, id="echo"),
    *(
        pytest.param(make, marks=pytest.mark.voice, id=make.__name__)
        for make in (
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
            qwen_image_denoiser,
            qwen_image_text_encoder,
            qwen_image_vae_encoder,
            qwen_image_vae_decoder,
            diffusers,
            bagel_context,
            bagel_denoiser,
            bagel,
        )
    ),
]
"""Parameters of a fixture: a function for each engine that makes its case. All but echo need the extra's libraries."""
