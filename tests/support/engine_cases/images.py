"""The cases of the engines that make pictures."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.support.engine_cases.case import Case, FeedArgs, shown


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
