"""The text encoder, the picture encoder and the picture decoder compute what diffusers computes.

They are compared to the bit: both sides run on this machine, with one thread, and do the same operations in the same
order.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from omni_actors.stages.base import InvalidRequest
from omni_actors.stages.diffusion import prompt
from tests.support.engine_driver import Driver
from tests.support.qwen_image_reference import open_pipeline, photo
from tiny_models import qwen_image as tiny

pytestmark = pytest.mark.voice  # it needs the libraries of the extras; the weights are random

CLASSES = {"text": "QwenImagePipeline", "edit": "QwenImageEditPipeline", "plus": "QwenImageEditPlusPipeline"}
AREA = 64 * 64


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function from the kind of a model to its checkpoint."""

    @functools.cache
    def get(kind: str) -> Path:
        made = tmp_path_factory.mktemp(kind)
        return tiny.save(made) if kind == "text" else tiny.save_edit(made, plus=kind == "plus")

    return get


@pytest.fixture(scope="module")
def pipeline(directory: Callable[[str], Path]) -> Callable[[str], Any]:
    """Return a function from the kind of a model to diffusers' pipeline of it."""
    return functools.cache(lambda kind: open_pipeline(directory(kind), CLASSES[kind]))


@pytest.fixture(scope="module")
def opened(directory: Callable[[str], Path], open_stage: Callable[..., Any]) -> Iterator[Callable[..., Driver]]:
    """Return a function from (engine, kind, options) to a driver."""
    with ExitStack() as stack:

        @functools.cache
        def get(engine: str, kind: str = "text", **options: Any) -> Driver:
            found = open_stage(f"qwen_image_{engine}", directory(kind), **options)
            return Driver(stack.enter_context(closing(found)))

        yield get


def encode_text(driver: Driver, prompt: str, images: list[Image.Image] = [], **params: Any) -> dict[str, Any]:  # noqa: B006
    driver.start(1, **params)
    for index, image in enumerate(images):
        driver.feed(1, {"index": index}, {"image": np.asarray(image)})
    driver.feed(1, {"messages": [{"role": "user", "content": prompt}]}, last=True)
    [output] = driver.run()[1]
    return {name: tensor.numpy() for name, tensor in output.tensors.items()}


def encode_pictures(driver: Driver, images: list[Any], **params: Any) -> dict[str, Any]:
    driver.start(1, **params)
    for index, image in enumerate(images):
        name = "encoded_image" if isinstance(image, bytes) else "image"
        content = np.frombuffer(image, np.uint8) if isinstance(image, bytes) else np.asarray(image)
        driver.feed(1, {"index": index}, {name: content}, last=index == len(images) - 1)
    [output] = driver.run()[1]
    return {name: tensor.numpy() for name, tensor in output.tensors.items()}


# the text encoder


@pytest.mark.parametrize("prompt", ["a red fox", "", "the sea <|im_end|> 海 {}"])
def test_prompts_are_encoded_as_diffusers_does(opened: Any, pipeline: Any, prompt: str) -> None:
    found = encode_text(opened("text_encoder"), prompt, negative_prompt="grey", guidance=2.0)
    assert found.keys() == {"prompt", "negative"}
    for name, text in (("prompt", prompt), ("negative", "grey")):
        with torch.no_grad():
            expected, mask = pipeline("text").encode_prompt(text)
        assert mask is None
        np.testing.assert_array_equal(found[name], expected[0])


@pytest.mark.parametrize(("guidance", "negative"), [(1.0, "grey"), (0.0, "grey"), (4.0, None)])
def test_without_guidance_there_is_no_negative_prompt(opened: Any, guidance: float, negative: str | None) -> None:
    found = encode_text(opened("text_encoder"), "a red fox", guidance=guidance, negative_prompt=negative)
    assert found.keys() == {"prompt"}


@pytest.mark.parametrize(("kind", "count"), [("edit", 1), ("plus", 1), ("plus", 2)])
def test_prompts_with_pictures_are_encoded_as_diffusers_does(opened: Any, pipeline: Any, kind: str, count: int) -> None:
    images = [photo(seed, 64, 64) for seed in range(count)]
    found = encode_text(opened("text_encoder", kind, image_area=AREA), "make it red", images, negative_prompt="grey")
    for name, text in (("prompt", "make it red"), ("negative", "grey")):
        with torch.no_grad():
            expected, _ = pipeline(kind).encode_prompt(text, images if kind == "plus" else images[0])
        np.testing.assert_array_equal(found[name], expected[0])


def test_the_last_message_of_the_user_is_the_prompt(opened: Any) -> None:
    driver = opened("text_encoder")
    roles = ("system", "user", "assistant", "user")
    messages = [
        {"role": role, "content": text} for role, text in zip(roles, ("one", "two", "three", "four"), strict=True)
    ]
    driver.start(1)
    driver.feed(1, {"messages": messages}, last=True)
    [output] = driver.run()[1]
    np.testing.assert_array_equal(output.tensors["prompt"].numpy(), encode_text(driver, "four")["prompt"])


# the picture encoder


def test_a_picture_to_start_from_is_sampled_as_diffusers_does(opened: Any, pipeline: Any) -> None:
    model = pipeline("text")
    image = photo(1)
    found = encode_pictures(opened("vae_encoder"), [image], size="48x32", seed=3)["latents"]
    pixels = model.image_processor.preprocess(image, height=32, width=48).unsqueeze(2)
    with torch.no_grad():
        sampled = model.vae.encode(pixels).latent_dist.sample(torch.Generator().manual_seed(3))
    config = model.vae.config
    mean, std = (torch.tensor(each).view(1, -1, 1, 1, 1) for each in (config.latents_mean, config.latents_std))
    np.testing.assert_array_equal(found, ((sampled - mean) * (1.0 / std))[0, :, 0])


@pytest.mark.parametrize(("kind", "count"), [("edit", 1), ("plus", 2)])
def test_pictures_to_look_at_are_encoded_as_diffusers_does(opened: Any, pipeline: Any, kind: str, count: int) -> None:
    model, images = pipeline(kind), [photo(seed, 64, 64) for seed in range(count)]
    found = encode_pictures(opened("vae_encoder", kind, image_area=AREA), images)
    for number, image in enumerate(images):
        pixels = model.image_processor.preprocess(image, 64, 64).unsqueeze(2)
        with torch.no_grad():
            expected = model._encode_vae_image(pixels, None)
        np.testing.assert_array_equal(found[f"latents.{number}" if count > 1 else "latents"], expected[0, :, 0])


# the picture decoder


def latents(seed: int = 0, size: tuple[int, int] = (8, 12)) -> Any:
    return np.random.default_rng(seed).normal(0, 1, (tiny.CHANNELS, *size)).astype(np.float32)


def decode(driver: Driver, chunks: list[Any], **resumption: Any) -> list[Any]:
    driver.start(1, ("denoiser",), **resumption)
    for step, chunk in enumerate(chunks, 1):
        final = step == len(chunks)
        data = {"step": step, "total": len(chunks), "final": final, "width": 48, "height": 32}
        driver.feed(1, data, {} if chunk is None else {"latents": chunk}, last=final, source="denoiser")
    outputs: list[Any] = driver.run()[1]
    return outputs


@pytest.mark.parametrize("tiling", [False, True])
def test_latents_are_decoded_as_diffusers_does(
    opened: Any, directory: Any, tiling: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = latents(size=(72, 72) if tiling else (8, 12))
    model = open_pipeline(directory("text"), "QwenImagePipeline")
    if tiling:
        model.vae.enable_tiling()
    packed = model._pack_latents(torch.tensor(given)[None, None], 1, tiny.CHANNELS, *given.shape[1:])
    monkeypatch.setattr(model.scheduler, "step", lambda *_, **__: (packed,))
    size = {"height": given.shape[1] * tiny.SCALE, "width": given.shape[2] * tiny.SCALE}
    [expected] = model("a", **size, latents=packed, num_inference_steps=2, true_cfg_scale=1.0).images
    [output] = decode(opened("vae_decoder", tiling=tiling), [given])
    np.testing.assert_array_equal(output.tensors["image"], np.asarray(expected))


def test_a_lost_preview_has_no_image(opened: Any) -> None:
    outputs = decode(opened("vae_decoder"), [None, latents(1), latents(2)])
    assert [(output.decisions, "image" in output.tensors) for output in outputs] == [
        ((1,), False),
        ((2,), True),
        ((3,), True),
    ]


def test_a_picture_that_is_not_needed_is_not_decoded(opened: Any) -> None:
    given = [latents(seed) for seed in range(3)]
    outputs = decode(opened("vae_decoder"), given, journal=((1,), (2,)), needed_from=1)
    assert ["image" in output.tensors for output in outputs] == [False, True, True]


# refusals


def refused(param: str, call: Callable[[], Any], driver: Driver) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as refusal:
        call()
    assert refusal.value.param == param
    driver.live.discard(1)
    return refusal.value


@pytest.mark.parametrize("param", ["prompt", "negative_prompt"])
@pytest.mark.parametrize("text", ["word " * 8000, "x" * 10_000_000], ids=["8,000 words", "10 MB"])
def test_a_long_prompt_is_refused(opened: Any, monkeypatch: pytest.MonkeyPatch, param: str, text: str) -> None:
    driver = opened("text_encoder")
    monkeypatch.setattr(driver.engine, "_encode", lambda _: pytest.fail("it was computed"))
    texts = {"prompt": "a", param: text}
    negative = texts.get("negative_prompt", "")[:1_000_000]
    refusal = refused(param, lambda: encode_text(driver, texts["prompt"], negative_prompt=negative), driver)
    assert refusal.code == "context_length_exceeded"


def test_a_long_prompt_with_as_many_rows_as_are_allowed_is_computed(opened: Any, pipeline: Any) -> None:
    with torch.no_grad():
        rows = len(pipeline("text").encode_prompt("hello")[0][0])
    assert len(encode_text(opened("text_encoder", max_prompt=rows), "hello")["prompt"]) == rows
    driver = opened("text_encoder", max_prompt=rows - 1)
    refused("prompt", lambda: encode_text(driver, "hello"), driver)


@pytest.mark.parametrize(
    ("engine", "images"),
    [
        ("text_encoder", []),  # the model looks at one
        ("text_encoder", [photo(1), photo(2)]),
        ("text_encoder", [photo(1, 400, 300)]),  # more pixels than the option allows
        ("text_encoder", [photo(1, 4000, 2)]),
        ("vae_encoder", [photo(1), photo(2)]),
        ("vae_encoder", [photo(1, 400, 300)]),
        ("vae_encoder", [photo(1, 4000, 2)]),
        ("vae_encoder", [b"no picture"]),
    ],
)
def test_pictures_out_of_bounds_are_refused(opened: Any, engine: str, images: list[Any]) -> None:
    driver = opened(engine, "edit", image_area=AREA, image_pixels=300 * 300)
    encode = functools.partial(encode_text, driver, "a") if engine == "text_encoder" else None
    refused("image", lambda: encode(images) if encode else encode_pictures(driver, images), driver)


@pytest.mark.parametrize("size", ["0x32", "33x32", "99992x99992", "9x9", "axb", "48"])
def test_a_size_out_of_bounds_is_refused(opened: Any, size: str) -> None:
    driver = opened("vae_encoder")
    refused("size", lambda: encode_pictures(driver, [photo(1)], size=size), driver)


def test_latents_of_a_picture_that_is_too_large_are_refused(opened: Any) -> None:
    driver = opened("vae_decoder", max_pixels=32 * 32)
    refused("size", lambda: decode(driver, [latents()]), driver)


# new weights


@pytest.mark.parametrize("engine", ["text_encoder", "vae_encoder", "vae_decoder"])
def test_new_weights_take_effect(engine: str, directory: Any, open_stage: Any, tmp_path: Path) -> None:
    """Those of another checkpoint, as if the stage had loaded that one. Files with wrong shapes change nothing."""
    folder, file = ("text_encoder", "model") if engine == "text_encoder" else ("vae", "diffusion_pytorch_model")
    other = tiny.save(tmp_path / "other", seed=1) / folder / f"{file}.safetensors"
    wrong = tmp_path / "wrong.safetensors"
    save_file({name: tensor[:1].clone() for name, tensor in load_file(other).items()}, wrong)
    with (
        closing(open_stage(f"qwen_image_{engine}", directory("text"))) as changed,
        closing(open_stage(f"qwen_image_{engine}", tmp_path / "other")) as expected,
    ):
        drivers = Driver(changed), Driver(expected)
        before = _result(engine, drivers[0])
        with pytest.raises(InvalidRequest):
            changed.call("update_weights", {"files": _files(wrong), "version": "2"})
        np.testing.assert_array_equal(_result(engine, drivers[0]), before)
        done = changed.call("update_weights", {"files": _files(other), "version": "2"})
        assert done["complete"]
        after = [_result(engine, driver) for driver in drivers]
        np.testing.assert_array_equal(*after)
        assert not np.array_equal(before, after[0])


def _result(engine: str, driver: Driver) -> Any:
    if engine == "text_encoder":
        return encode_text(driver, "a red fox")["prompt"]
    if engine == "vae_encoder":
        return encode_pictures(driver, [photo(1)], size="48x32", seed=1)["latents"]
    return decode(driver, [latents()])[0].tensors["image"]


def _files(path: Path) -> dict[str, tuple[int, int]]:
    status = path.stat()
    return {str(path): (status.st_size, status.st_mtime_ns)}


@pytest.mark.parametrize("size", [{}, {"size": "64x64"}])
def test_a_picture_that_is_too_thin_is_refused(opened: Any, size: dict[str, str]) -> None:
    """Also where the request has a size, to which a line of pixels would be scaled through gigabytes."""
    driver, line = opened("vae_encoder", image_area=AREA), np.zeros((1, 201, 3), np.uint8)
    refusal = refused("image", lambda: encode_pictures(driver, [line], **size), driver)
    assert str(refusal) == "image 0: found 201 × 1 pixels; the limit is a ratio of 200"


def test_the_pictures_of_a_request_share_the_time_for_decoding(opened: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt, "DECODE_S", 1e-9)
    driver = opened("vae_encoder", "plus", image_area=AREA)
    refusal = refused("image", lambda: encode_pictures(driver, [photo(0, 64, 64)]), driver)
    assert refusal.code == "image_too_slow"
