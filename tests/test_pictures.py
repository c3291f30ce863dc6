"""Pictures as typed outputs of the library: previews, several of one prompt, pictures as input, and bounds on the work.

The engine needs no model (``tests.support.painting_engine``).
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio
from PIL import Image

from omni_actors import OmniSystem, Picture
from omni_actors.config import Limits, Pipeline, Stage
from omni_actors.errors import InvalidRequest
from omni_actors.sync import Omni
from omni_actors.system.parameters import Parameters
from omni_actors.system.pictures import checked_work, seed_of
from tests.support.shared_system import SharedSystem, open_shared_system, use_shared_system, with_shared_system

WATCHDOG_S = 60.0
PAINTER = "tests.support.painting_engine:PaintingEngine"
LIMIT = 8
PAINTING = Pipeline(
    name="painting",
    limits=Limits(max_requests=LIMIT, pixel_steps=64 * 64 * 100),
    stages={
        "painter": Stage(
            engine=PAINTER,
            accepts=("messages", "image"),
            emits="image",
            options={"size": "32x24"},
            deterministic=True,
        ),
        "text": Stage(engine="echo", accepts=("messages",), emits="text"),
    },
)
PIXELS = np.arange(4 * 5 * 3, dtype=np.uint8).reshape(4, 5, 3)


@pytest.fixture(scope="module")
def shared_system(fixture_processes: set[int]) -> Iterator[SharedSystem]:
    with open_shared_system(lambda: OmniSystem.open(PAINTING), fixture_processes) as shared_system:
        yield shared_system


def draw(omni: OmniSystem, prompt: Any = "a cat", **arguments: Any) -> Any:
    return omni.generate(prompt, modalities=("image",), **arguments)


async def drawn(omni: OmniSystem, prompt: Any = "a cat", **arguments: Any) -> Picture:
    with trio.fail_after(WATCHDOG_S):
        picture = await draw(omni, prompt, **arguments).picture()
    assert isinstance(picture, Picture)
    return picture


# outputs


@with_shared_system
async def test_previews_come_before_the_finished_picture(omni: OmniSystem) -> None:
    outputs = [output async for output in draw(omni, size="40x24", steps=5, previews=2, seed=1)]
    assert {output.modality for output in outputs} == {"image"}
    found = [output.delta for output in outputs]
    assert [(each.step, each.total, each.final) for each in found] == [(2, 5, False), (4, 5, False), (5, 5, True)]
    assert all((each.width, each.height) == (40, 24) for each in found)
    assert all(each.pixels.shape == (24, 40, 3) and each.pixels.dtype == np.uint8 for each in found)
    assert [output.finished for output in outputs] == [False, False, True]
    metrics = outputs[-1].metrics
    assert metrics.preview_s <= metrics.picture_s <= metrics.total_s
    assert metrics.ttft_s is None
    exposed = omni.metrics.exposition().decode()
    assert "omni_preview_seconds_count" in exposed
    assert "omni_picture_seconds_count" in exposed


@with_shared_system
async def test_an_answer_has_the_finished_pictures_only(omni: OmniSystem) -> None:
    generation = draw(omni, steps=3, previews=1, seed=1)
    answer = await generation.collect()
    assert [picture.step for picture in answer.pictures] == [3]
    assert answer.picture is answer.pictures[0]
    assert await generation.pictures() == answer.pictures
    assert answer.data == {"image": {"step": 3, "total": 3, "final": True, "weights_version": "0"}}
    assert (answer.text, answer.audio) == ("", None)


@with_shared_system
async def test_an_output_without_a_picture_tells_progress(omni: OmniSystem) -> None:
    outputs = [output async for output in draw(omni, "progress", steps=3)]
    assert [(output.delta is None, output.data["step"]) for output in outputs] == [(True, 1), (True, 2), (False, 3)]
    none = draw(omni, "colourless")
    assert await none.picture() is None
    assert await none.pictures() == ()


@with_shared_system
async def test_the_total_of_pictures_is_the_newest_one(omni: OmniSystem) -> None:
    outputs = [output async for output in draw(omni, steps=3, previews=1, output_kind="cumulative")]
    assert len(outputs) == 3
    assert all(output.total is output.delta for output in outputs)


def test_a_picture_is_saved_in_the_format_of_the_suffix(shared_system: SharedSystem, tmp_path: Path) -> None:
    async def save(omni: OmniSystem) -> None:
        generation = draw(omni, seed=2)
        for name, kind in (("a.png", "PNG"), ("a.JPG", "JPEG"), ("a.webp", "WEBP")):
            picture = await generation.save(tmp_path / name)
            with Image.open(tmp_path / name) as opened:
                assert (opened.format, opened.size) == (kind, (picture.width, picture.height))
                if kind == "PNG":
                    assert np.array_equal(np.asarray(opened), picture.pixels)
        assert await draw(omni, "colourless").save(tmp_path / "none.png") is None
        with pytest.raises(ValueError, match=r"'\.gif'.*\.wav.*\.png"):
            await draw(omni).save("a.gif")

    shared_system.run(save)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.JPG", "a.png", "a.webp"]


@pytest.mark.parametrize(("format", "longest"), [("jpeg", 65_500), ("webp", 16_383)])
def test_a_picture_is_encoded_up_to_the_longest_side_of_its_format(format: Any, longest: int) -> None:
    for shape in ((1, longest, 3), (longest, 1, 3)):
        assert Picture(np.zeros(shape, np.uint8)).encode(format)
    with pytest.raises(ValueError, match=f"{format} has at most {longest} pixels a side"):
        Picture(np.zeros((longest + 1, 1, 3), np.uint8)).encode(format)
    assert Picture(np.zeros((longest + 1, 1, 3), np.uint8)).encode("png")


def test_an_unknown_format_of_a_picture_is_refused() -> None:
    with pytest.raises(ValueError, match="png, jpeg, webp"):
        Picture(PIXELS).encode("gif")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"\.webp"):
        Picture(PIXELS).save("cat.bmp")
    small, large = (len(Picture(PIXELS.repeat(40, 0)).encode("jpeg", quality=quality)) for quality in (5, 95))
    assert small < large
    assert Picture(PIXELS)._repr_png_() == Picture(PIXELS).encode()


# arguments


@with_shared_system
async def test_n_pictures_have_consecutive_seeds(omni: OmniSystem) -> None:
    answers = await draw(omni, n=3, seed=5, request_id="mine").collect()
    alone = [await drawn(omni, seed=seed) for seed in (5, 6, 7)]
    for answer, expected in zip(answers, alone, strict=True):
        assert np.array_equal(answer.picture.pixels, expected.pixels)
    assert len(await draw(omni, n=1).collect()) == 1
    assert draw(omni, n=2, request_id="mine").request_ids == ("mine-0", "mine-1")


@with_shared_system
async def test_a_list_of_prompts_makes_n_pictures_of_each(omni: OmniSystem) -> None:
    answers = await draw(omni, ["a cat", "a dog"], n=2, seed=1).collect()
    assert [answer.index for answer in answers] == [0, 1, 2, 3]
    expected = [await drawn(omni, prompt, seed=seed) for prompt in ("a cat", "a dog") for seed in (1, 2)]
    for answer, picture in zip(answers, expected, strict=True):
        assert np.array_equal(answer.picture.pixels, picture.pixels)


@pytest.mark.parametrize("n", [0, -1, 1.0, True, "2", LIMIT + 1])
def test_a_wrong_n_is_refused(shared_system: SharedSystem, n: Any) -> None:
    async def refused(omni: OmniSystem) -> None:
        with pytest.raises(InvalidRequest, match="n: expected an integer from 1") as error:
            draw(omni, n=n)
        assert error.value.param == "n"

    shared_system.run(refused)


@with_shared_system
async def test_live_input_is_for_one_request(omni: OmniSystem) -> None:
    async def parts() -> AsyncIterator[str]:
        yield "a cat"

    with pytest.raises(InvalidRequest, match="live input") as refused:
        draw(omni, parts(), n=2)
    assert refused.value.param == "n"


@with_shared_system
async def test_an_image_may_be_given_apart(omni: OmniSystem) -> None:
    same = await drawn(omni, seed=1, multi_modal_data={"image": [PIXELS]})
    for given in (PIXELS, [PIXELS], Image.fromarray(PIXELS)):
        assert np.array_equal((await drawn(omni, seed=1, image=given)).pixels, same.pixels)
    assert not np.array_equal((await drawn(omni, seed=1)).pixels, same.pixels)
    assert not np.array_equal((await drawn(omni, seed=1, image=[PIXELS, PIXELS])).pixels, same.pixels)
    [first, second] = await draw(omni, seed=1, image=PIXELS, n=2).collect()
    assert np.array_equal(first.picture.pixels, same.pixels)
    assert not np.array_equal(second.picture.pixels, same.pixels)


@with_shared_system
async def test_a_wrong_image_is_refused(omni: OmniSystem) -> None:
    for given in ({"image": "cat.png"}, {"image": [Path("missing.png")]}, {"image": PIXELS[..., :2]}):
        with pytest.raises(InvalidRequest, match="image 0: ") as refused:
            draw(omni, **given)
        assert refused.value.param == "image"
    with pytest.raises(InvalidRequest, match="one of both") as refused:
        draw(omni, image=PIXELS, multi_modal_data={"image": PIXELS})
    assert refused.value.param == "image"
    with pytest.raises(InvalidRequest, match="brings its own"):
        draw(omni, ["a", "b"], image=PIXELS)


@with_shared_system
async def test_a_size_may_be_a_pair(omni: OmniSystem) -> None:
    named = await drawn(omni, size="40x24", seed=1)
    for pair in ((40, 24), [40, 24]):
        assert np.array_equal((await drawn(omni, size=pair, seed=1)).pixels, named.pixels)


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"size": (0, 8)}, "size"),
        ({"size": (8, 8, 8)}, "size"),
        ({"size": "0x8"}, "size"),
        ({"size": "big"}, "size"),
        ({"steps": 0}, "steps"),
        ({"steps": 10_000}, "steps"),
        ({"guidance": float("nan")}, "guidance"),
        ({"seed": "x", "n": 2}, "seed"),
        ({"size": "65x64", "steps": 100}, "size"),
        ({"size": (99_999, 99_999)}, "size"),
        ({"size": "64x64", "steps": 60, "n": 2}, "n"),
        ({"steps": 800}, "steps"),
    ],
)
def test_a_wrong_parameter_is_named(shared_system: SharedSystem, given: dict[str, Any], param: str) -> None:
    async def refused(omni: OmniSystem) -> None:
        with pytest.raises(InvalidRequest, match=param) as error, trio.fail_after(WATCHDOG_S):
            await draw(omni, **given).collect()
        assert error.value.param == param
        assert omni.in_flight == 0

    shared_system.run(refused)


def test_the_work_counts_the_options_of_a_stage_as_defaults() -> None:
    options = {"size": "64x64", "steps": 101}
    stages = {"painter": Stage(engine=PAINTER, accepts=("messages",), emits="image", options=options)}
    pipeline = Pipeline(name="painting", limits=PAINTING.limits, stages=stages)
    with pytest.raises(InvalidRequest, match=r"64x64 pixels × 101 steps × 1 are 413696; limits\.pixel_steps is 409600"):
        checked_work(pipeline, {"painter": {"size": None, "steps": None}}, {}, 1)
    assert checked_work(pipeline, {"painter": {"size": None, "steps": 100}}, {"steps": 100}, 1) == 64 * 64 * 100
    assert checked_work(pipeline, {"painter": {"size": "8x4", "steps": None}}, {}, 2) == 8 * 4 * 101
    assert checked_work(pipeline, {"painter": {"size": "8x4", "steps": 3}}, {}, 1) == 8 * 4 * 3
    assert checked_work(pipeline, {"painter": {"seed": 1}}, {}, 1) == 1


@pytest.mark.parametrize(
    ("engine", "given", "n", "param"),
    [
        ("diffusers", {}, 20, None),
        ("diffusers", {}, 21, "n"),
        ("diffusers", {"steps": 1000}, 1, None),
        ("diffusers", {"steps": 1000}, 2, "n"),
        ("diffusers", {"size": "2048x2048"}, 5, None),
        ("diffusers", {"size": "2048x2048"}, 6, "n"),
        ("diffusers", {"size": "9999x9999"}, 1, "size"),
        ("bagel_denoiser", {"steps": 1000}, 2, "n"),
        (PAINTER, {"size": "2048x2048"}, 6, "n"),
        (PAINTER, {"steps": 1025}, 1, "steps"),
        ("qwen_image_vae_encoder", {"size": "9999x9999"}, 50, None),
        ("bagel_context", {}, 1100, None),  # a text
    ],
)
def test_the_work_counts_what_is_not_known_as_usual(
    engine: str, given: dict[str, Any], n: int, param: str | None
) -> None:
    """The limit is its default, 2**30; a usual picture has 2**20 pixels and 50 steps."""
    stage = Stage(engine=engine, model="model", accepts=("messages",), emits="image", deterministic=True)
    pipeline = Pipeline(name="painting", stages={"painter": stage})
    by_stage = Parameters(pipeline).by_stage(["painter"], given)
    if param is None:
        checked_work(pipeline, by_stage, given, n)
        return
    with pytest.raises(InvalidRequest, match=rf"{param}: \w+ pixels × \d+ steps × {n} are ") as refused:
        checked_work(pipeline, by_stage, given, n)
    assert refused.value.param == param


def test_the_seeds_of_several_pictures_stay_in_range() -> None:
    last = 2**63 - 1
    assert [seed_of(last - 1, index) for index in range(3)] == [last - 1, last, -(2**63)]
    assert [seed_of(-1, index) for index in range(2)] == [-1, 0]
    for seed in (None, "x", True, 1.5):
        assert seed_of(seed, 1) is seed


@with_shared_system
async def test_pictures_from_the_last_seed_on_are_drawn(omni: OmniSystem) -> None:
    answers = await draw(omni, n=2, seed=2**63 - 1).collect()
    for answer, seed in zip(answers, (2**63 - 1, -(2**63)), strict=True):
        assert np.array_equal(answer.picture.pixels, (await drawn(omni, seed=seed)).pixels)


# programs


def test_the_example_writes_previews_and_pictures(
    shared_system: SharedSystem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Image.fromarray(PIXELS).save(tmp_path / "seen.png")
    example = Path(__file__).parent.parent / "examples" / "draw.py"
    arguments = ["a cat", "--pipeline", "echo", "-n", "2", "--size", "16x8", "--steps", "6", "--image", "seen.png"]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(example), *arguments])
    with monkeypatch.context() as patch:
        assert use_shared_system(shared_system, patch) == []
        runpy.run_path(str(example), run_name="__main__")
    files = ["0-step5.png", "0.png", "1-step5.png", "1.png"]
    assert sorted(path.name for path in tmp_path.iterdir()) == [*files, "seen.png"]
    assert sorted(line.partition(":")[0] for line in capsys.readouterr().out.splitlines()) == files


@pytest.mark.voice
@pytest.mark.slow
def test_a_model_draws_and_edits_in_processes(tmp_path: Path, fixture_processes: set[int]) -> None:
    """A tiny Qwen-Image with random weights."""
    from tiny_models import qwen_image  # imports torch

    model = qwen_image.save(tmp_path / "model")
    with Omni.open(model) as omni:
        ask = partial(omni.generate, modalities=("image",), size=(64, 48), steps=4, seed=1)
        drawn = [each.delta for each in ask("a cat", previews=2)]
        assert [(each.step, each.total, each.final) for each in drawn] == [(2, 4, False), (4, 4, True)]
        assert drawn[-1].pixels.shape == (48, 64, 3)
        first, second = (answer.picture.pixels for answer in ask("a cat", n=2).collect())
        assert np.abs(first.astype(int) - drawn[-1].pixels).max() <= 1  # another batch rounds differently
        assert not np.array_equal(first, second)
        changed = ask("a cat", image=drawn[-1].pixels, strength=0.5).picture()
        assert changed is not None
        assert changed.pixels.shape == first.shape
        for given, param in (({"size": "63x65"}, "size"), ({"steps": 101}, "steps"), ({"image": b"no"}, "image")):
            with pytest.raises(InvalidRequest) as refused:
                ask("a cat", **given).collect()
            assert refused.value.param == param


# faces


def test_the_blocking_face_draws_too(fixture_processes: set[int], tmp_path: Path) -> None:
    with Omni.open(PAINTING) as omni:
        generation = omni.generate("a cat", modalities=("image",), seed=1, steps=2, previews=1)
        assert [output.delta.final for output in generation] == [False, True]
        pictures = omni.generate("a cat", modalities=("image",), n=2, size=(16, 8)).collect()
        assert [(each.picture.width, each.picture.height) for each in pictures] == [(16, 8), (16, 8)]
        saved = omni.generate("a cat", modalities=("image",), image=PIXELS).save(tmp_path / "cat.png")
        assert isinstance(saved, Picture)
        assert (tmp_path / "cat.png").stat().st_size
        picture = omni.generate("a cat", modalities=("image",)).picture()
        assert picture is not None
        assert picture.final
