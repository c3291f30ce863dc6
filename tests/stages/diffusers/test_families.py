"""Each family of pipelines: the pixels of the pipeline's own call, whatever runs beside it."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from PIL import Image

from omni_actors.stages.base import InvalidRequest, StageEngine, StageFailure
from omni_actors.stages.diffusers.call import Runner
from omni_actors.stages.diffusers.options import DiffusersOptions
from omni_actors.stages.diffusers.pictures import Previews
from tests.support.adapters import adapter, save_adapter, with_adapter
from tests.support.engine_driver import Driver
from tiny_models import diffusers_pipelines as tiny

pytestmark = [
    pytest.mark.voice,  # it needs the libraries of an extra; the weights are random
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:__array__:DeprecationWarning"),  # of diffusers' own
]
SIZE = {"width": 32, "height": 16}
STEPS = 3
VIDEO = {"num_frames": 5}
QUICK = ("flux", "wan")
"""The families that `make test` runs."""
IMAGE_TO_IMAGE = ("stable_diffusion", "stable_diffusion_xl", "stable_diffusion_3", "flux")


class Family:
    """A family's directory, its engine, and diffusers' own pipeline of the same weights."""

    def __init__(self, name: str, directory: Path, engine: StageEngine) -> None:
        self.name, self.directory, self.engine = name, directory, engine
        self.own: Any = diffusers.DiffusionPipeline.from_pretrained(directory)
        self.own.set_progress_bar_config(disable=True)
        self.more: dict[str, Any] = VIDEO if name == "wan" else {}
        self.default: dict[str, Any] = {"size": "32x16", "steps": STEPS, "pipeline_kwargs": dict(self.more)}
        if name == "pixart":
            self.more = self.default["pipeline_kwargs"] = {"use_resolution_binning": False}

    def expected(self, prompt: str, seed: int, **more: Any) -> np.ndarray[Any, Any]:
        """The frames of diffusers' own call: uint8 (n, height, width, 3)."""
        arguments: dict[str, Any] = {**SIZE, "num_inference_steps": STEPS, **self.more, **more}
        pipeline = arguments.pop("pipeline", self.own)
        arguments = {name: value for name, value in arguments.items() if value is not None}
        generator = torch.Generator().manual_seed(seed)
        made = pipeline(prompt, **arguments, generator=generator, output_type="np")[0][0]
        return np.asarray((made if made.ndim == 4 else made[None]) * 255).round().astype(np.uint8)


@pytest.fixture(scope="module")
def family_of(
    tmp_path_factory: pytest.TempPathFactory, open_stage: Callable[..., StageEngine]
) -> Iterator[Callable[[str], Family]]:
    made: dict[str, Family] = {}
    with ExitStack() as stack, warnings.catch_warnings():
        warnings.simplefilter("ignore")

        def get(name: str) -> Family:
            if name not in made:
                directory = tiny.save(tmp_path_factory.mktemp(name), name)
                engine = stack.enter_context(closing(open_stage("diffusers", directory)))
                made[name] = Family(name, directory, engine)
            return made[name]

        yield get


def unless_slow(names: Iterable[str]) -> list[Any]:
    """Return the families as parameters, all but ``QUICK`` with the marker ``slow``."""
    return [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in names]


@pytest.fixture(params=unless_slow(tiny.FAMILIES))
def family(request: pytest.FixtureRequest, family_of: Callable[[str], Family]) -> Family:
    return family_of(request.param)


def ask(driver: Driver, number: int, prompt: str, *images: np.ndarray[Any, Any], **params: Any) -> None:
    driver.start(number, **params)
    for index, image in enumerate(images):
        driver.feed(number, {"index": index}, {"image": image})
    driver.feed(number, {"messages": [{"role": "user", "content": prompt}]}, last=True)


def frames(outputs: list[Any]) -> np.ndarray[Any, Any]:
    """The final pictures of a request."""
    final = [output for output in outputs if output.data["final"]]
    assert [output.last for output in final] == [False] * (len(final) - 1) + [True]
    return np.stack([output.tensors["image"] for output in final])


def test_its_pixels_are_those_of_the_pipeline(family: Family, drive: Any) -> None:
    driver = drive(family.engine)
    for number, prompt in enumerate(("a cat", "two ships at sea")):
        ask(driver, number, prompt, **family.default, seed=number)
    outputs = driver.run()
    for number, prompt in enumerate(("a cat", "two ships at sea")):
        made = frames(outputs[number])
        assert made.shape[1:] == (16, 32, 3)
        assert np.array_equal(made, family.expected(prompt, seed=number))
    assert len(made) == (5 if family.name == "wan" else 1)


def test_guidance_and_a_negative_prompt_reach_the_pipeline(family: Family, drive: Any) -> None:
    driver, scale = drive(family.engine), "guidance_scale"
    if family.name == "flux":
        scale = "true_cfg_scale"
    ask(driver, 1, "a cat", **family.default, seed=1, guidance=3.0, negative_prompt="a dog")
    made = frames(driver.run()[1])
    assert np.array_equal(made, family.expected("a cat", 1, **{scale: 3.0}, negative_prompt="a dog"))
    assert not np.array_equal(made, family.expected("a cat", 1))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["flux", "stable_diffusion"])
def test_each_request_has_its_own_adapter(
    name: str, family_of: Callable[[str], Family], drive: Any, tmp_path: Path
) -> None:
    """Beside the pipeline whose denoiser PEFT has changed; the pixels may differ by one of rounding."""
    family, driver = family_of(name), drive(family_of(name).engine)
    part = "transformer" if name == "flux" else "unet"
    own = diffusers.DiffusionPipeline.from_pretrained(family.directory)
    own.set_progress_bar_config(disable=True)
    fresh = getattr(diffusers.DiffusionPipeline.from_pretrained(family.directory), part)
    lora = save_adapter(fresh, tmp_path, target_modules=["to_q", "to_v"])
    setattr(own, part, with_adapter(getattr(own, part), lora).base_model.model)
    ask(driver, 1, "a cat", **family.default, seed=1)
    ask(driver, 2, "a cat", **family.default, seed=1, lora=adapter(lora))
    outputs = driver.run()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = family.expected("a cat", 1, pipeline=own)
    assert np.array_equal(frames(outputs[1]), family.expected("a cat", 1))
    assert np.abs(frames(outputs[2]).astype(int) - expected).max() <= 1
    assert np.abs(frames(outputs[1]).astype(int) - expected).max() > 1
    assert not family.engine._adapters.loaded  # type: ignore[attr-defined]


def test_progress_has_no_picture(family: Family, drive: Any) -> None:
    driver = drive(family.engine)
    ask(driver, 1, "a cat", **family.default, seed=1, progress=1)
    outputs = [output for output in driver.run()[1] if not output.data["final"]]
    assert [(output.data["step"], dict(output.tensors)) for output in outputs] == [(1, {}), (2, {})]


def test_a_preview_is_what_the_latents_of_its_step_decode_to(family: Family, drive: Any) -> None:
    """The last latents decode to the picture."""
    driver = drive(family.engine)
    ask(driver, 1, "a cat", **family.default, seed=1, previews=1)
    outputs = driver.run()[1]
    previews = [output for output in outputs if not output.data["final"]]
    assert [(output.data["step"], output.data["total"]) for output in previews] == [(1, STEPS), (2, STEPS)]
    assert all(output.tensors["image"].shape == (16, 32, 3) for output in previews)
    kept: list[torch.Tensor] = []
    arguments = {**SIZE, "num_inference_steps": STEPS, **family.more}
    runner = Runner(family.own, DiffusersOptions())
    if runner.arguments.takes("callback_on_step_end"):
        arguments["callback_on_step_end"] = lambda *given: kept.append(given[-1]["latents"]) or {}
    else:
        arguments |= {"callback": lambda *given: kept.append(given[-1]), "callback_steps": 1}
    generator = torch.Generator().manual_seed(1)
    made = family.own("a cat", **arguments, generator=generator, output_type="np")[0][0]
    with torch.no_grad():
        decoded = [runner.previews.decode(family.own, latents, SIZE) for latents in kept]
    for output, expected in zip(previews, decoded, strict=False):
        assert np.array_equal(output.tensors["image"], expected)
    off = np.abs(decoded[-1] - (made[0] if made.ndim == 4 else made) * 255)
    assert off.max() <= 1, "the first frame of a video is decoded alone, which rounds differently"


def test_a_pipeline_with_a_safety_checker_reports_progress_without_pictures(
    family_of: Callable[[str], Family], drive: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    family = family_of("flux")
    monkeypatch.setattr(family.own, "safety_checker", object(), raising=False)
    assert not Previews(family.own).possible
    monkeypatch.setattr(family.engine._runner.previews, "possible", False)  # type: ignore[attr-defined]
    driver = drive(family.engine)
    ask(driver, 1, "a cat", **family.default, seed=1, previews=1)
    assert [(output.data["step"], len(output.tensors)) for output in driver.run()[1]] == [(1, 0), (2, 0), (3, 1)]


@pytest.mark.parametrize("name", unless_slow(IMAGE_TO_IMAGE))
def test_a_request_with_a_picture_begins_with_it(name: str, family_of: Callable[[str], Family], drive: Any) -> None:
    family = family_of(name)
    pixels = np.random.default_rng(0).integers(0, 255, (16, 32, 3), np.uint8)
    size: dict[str, Any] = {} if name in ("stable_diffusion", "stable_diffusion_xl") else {"size": "32x16"}
    driver = drive(family.engine)
    ask(driver, 1, "a cat", pixels, steps=4, strength=0.5, seed=1, **size)
    twin = diffusers.AutoPipelineForImage2Image.from_pipe(family.own)
    twin.set_progress_bar_config(disable=True)
    shape = SIZE if size else dict.fromkeys(SIZE)
    more = {"pipeline": twin, "image": Image.fromarray(pixels), "num_inference_steps": 4, "strength": 0.5}
    assert np.array_equal(frames(driver.run()[1]), family.expected("a cat", 1, **more, **shape))


@pytest.mark.parametrize("name", unless_slow(["flux", "pixart"]))
@pytest.mark.parametrize("steps", [0, 1, 4])
def test_abort_frees_a_call_at_every_step(
    name: str, steps: int, family_of: Callable[[str], Family], drive: Any
) -> None:
    family, before = family_of(name), set(threading.enumerate())
    driver = drive(family.engine)
    ask(driver, 1, "a cat", **{**family.default, "steps": 5}, seed=1)
    for _ in range(steps):
        assert driver.step() == []
    driver.abort(1)
    assert set(threading.enumerate()) <= before  # an idle thread of other tests may end
    ask(driver, 2, "a cat", **family.default, seed=1)
    assert np.array_equal(frames(driver.run()[2]), family.expected("a cat", 1))


def test_what_a_call_does_not_take_is_refused_with_the_field(family_of: Callable[[str], Family], drive: Any) -> None:
    flux, xl = (drive(family_of(name).engine) for name in ("flux", "stable_diffusion_xl"))
    pixels = np.zeros((16, 32, 3), np.uint8)
    cases: list[tuple[Driver, str, dict[str, Any], tuple[Any, ...]]] = [
        (flux, "guidance", {"negative_prompt": "a dog", "guidance": 1.0}, ()),
        (flux, "guidance", {"negative_prompt": "a dog"}, ()),
        (flux, "strength", {"strength": 0.5}, ()),
        (flux, "size", {"size": "30x18"}, ()),
        (xl, "size", {"size": "31x16"}, ()),
        (xl, "size", {"size": "9999x9999"}, ()),
        (xl, "size", {"size": "32x16"}, (pixels,)),
        (xl, "steps", {"steps": 101}, ()),
        (xl, "image", {}, (pixels,) * 4),
        *((xl, "pipeline_kwargs", {"pipeline_kwargs": kwargs}, ()) for kwargs in REFUSED_KWARGS),
    ]
    for driver, field, params, images in cases:
        with pytest.raises(InvalidRequest) as refusal:
            ask(driver, 1, "a cat", *images, **{"steps": 2, **params})
        assert refusal.value.param == field, (params, refusal.value)
        driver.live.discard(1)
    with pytest.raises(InvalidRequest, match="limit is 8192") as refusal:
        ask(xl, 1, "a cat " * 8000)
    assert (refusal.value.param, refusal.value.code) == ("messages", "context_length_exceeded")
    xl.live.discard(1)


REFUSED_KWARGS: list[dict[str, Any]] = [
    {"unknown": 1},
    {"num_inference_steps": 1},
    {"height": 32},
    {"num_images_per_prompt": 1000},
    {"callback_on_step_end": None},
    {"output_type": "latent"},
    {"generator": 1},
    {"latents": 1.0},
    {"eta": float("nan")},
    {"eta": 1e9},
    {"eta": "1"},
    {"clip_skip": True},
    {"original_size": [1, 2]},
    {"prompt_2": "x" * 9000},
    {"denoising_end": float("inf")},
]


def test_what_the_pipeline_refuses_ends_its_request_only(family_of: Callable[[str], Family], drive: Any) -> None:
    """Wan's transformer takes patches of two latents: a size that only the pipeline itself can judge."""
    family = family_of("wan")
    driver = drive(family.engine)
    ask(driver, 1, "a cat", **{**family.default, "size": "24x16"}, seed=1)
    ask(driver, 2, "a cat", **family.default, seed=2)
    outputs = driver.run()
    [failure] = outputs[1]
    assert isinstance(failure, StageFailure)
    assert failure.error.param == "size"
    assert np.array_equal(frames(outputs[2]), family.expected("a cat", 2))


def test_requests_take_turns_and_a_lower_priority_comes_first(
    family_of: Callable[[str], Family], open_stage: Callable[..., StageEngine], drive: Any
) -> None:
    family = family_of("flux")
    with closing(open_stage("diffusers", family.directory, max_running=2)) as engine:
        driver = drive(engine)
        for number, priority in enumerate((0, 0, 5, -5)):
            ask(driver, number, "a cat", **{**family.default, "steps": 4}, seed=1, priority=priority, previews=1)
        order = [output.request_id for outputs in iter_steps(driver) for output in outputs]
    assert [order.index(number) for number in (3, 0)] == [0, 1], "the first two to run"
    ends = sorted(range(4), key=lambda number: max(at for at, each in enumerate(order) if each == number))
    assert ends == [3, 0, 1, 2]


def iter_steps(driver: Driver) -> Iterator[list[Any]]:
    while driver.engine.busy:
        yield driver.step()


def test_a_paused_request_is_left_out_and_gives_up_its_place(
    family_of: Callable[[str], Family], open_stage: Callable[..., StageEngine], drive: Any
) -> None:
    family = family_of("wan")
    with closing(open_stage("diffusers", family.directory, max_running=1)) as engine:
        driver, pausable = drive(engine), engine
        assert hasattr(pausable, "pause")
        ask(driver, 1, "a cat", **family.default, seed=1)
        driver.step()
        pausable.pause(1)
        ask(driver, 2, "a cat", **family.default, seed=2)
        assert driver.run().keys() == {2}
        pausable.resume(1)
        assert np.array_equal(frames(driver.run()[1]), family.expected("a cat", 1))
