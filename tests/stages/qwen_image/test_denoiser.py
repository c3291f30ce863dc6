"""The denoiser's batch: joining, waiting, leaving, previews, pausing, deaths, and requests that are refused."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from omni_actors.stages.base import InvalidRequest, StageFailure
from omni_actors.stages.checkpoint import WrongCheckpoint
from omni_actors.stages.qwen_image.denoiser import DenoiserEngine
from tests.stages.qwen_image.denoiser_requests import TEXT, Request, final, states
from tests.support.adapters import adapter, save_adapter, with_adapter
from tests.support.closeness import assert_close
from tests.support.engine_driver import Driver
from tiny_models import qwen_image as tiny

pytestmark = pytest.mark.voice  # it needs the libraries of the extras; the weights are random

OPTIONS = {"max_batch": 4, "max_pixels": 128 * 128, "max_prompt": 16}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("qwen_image"))


@pytest.fixture(scope="module")
def engine(checkpoint: Path, open_stage: Callable[..., Any]) -> Iterator[DenoiserEngine]:
    with closing(open_stage("qwen_image_denoiser", checkpoint, **OPTIONS)) as opened:
        yield opened


@pytest.fixture
def driver(engine: DenoiserEngine, drive: Callable[..., Driver]) -> Driver:
    return drive(engine)


def plain(**params: Any) -> Request:
    return Request(states(5), **params)


def ended(driver: Driver, steps: int) -> list[int]:
    """The requests that end in the next steps, in order."""
    return [output.request_id for _ in range(steps) for output in driver.step() if output.last]


def abort(driver: Driver, *numbers: int) -> None:
    for number in numbers:
        driver.abort(number)


# the batch


def test_a_short_request_that_joins_long_ones_takes_its_own_steps_only(driver: Driver) -> None:
    for number in (1, 2, 3):
        plain(steps=50, size=f"{32 * number}x64").submit(driver, number)
    assert not ended(driver, 2)
    plain(steps=4).submit(driver, 4)
    assert not ended(driver, 3)
    assert ended(driver, 1) == [4]
    abort(driver, 1, 2, 3)


def test_requests_wait_for_rows_by_priority_and_then_by_arrival(driver: Driver) -> None:
    for number in (1, 2):  # with companions: four rows, so the batch is full
        Request(states(5), states(3, 1), steps=3).submit(driver, number)
    assert not ended(driver, 1)
    plain(steps=2).submit(driver, 3)
    plain(steps=2, priority=-1).submit(driver, 4)
    plain(steps=2, priority=-1).submit(driver, 5)
    assert driver.engine.gauges() | {"step_seconds": 0, "next_end_s": 0} == {
        "running": 2,
        "waiting": 3,
        "steps_left": 10,
        "step_seconds": 0,
        "next_end_s": 0,
    }
    assert ended(driver, 2) == [1, 2]
    assert ended(driver, 2) == [4, 5, 3], "in one step, in the order in which they got rows"


def test_a_request_with_more_rows_than_the_batch_runs_alone(checkpoint: Path, open_stage: Any) -> None:
    with closing(open_stage("qwen_image_denoiser", checkpoint, max_batch=1)) as engine:
        driver = Driver(engine)
        for number in (1, 2):
            Request(states(5), states(3, 1), steps=2).submit(driver, number)
        assert ended(driver, 4) == [1, 2]


def test_an_abort_frees_rows_for_the_next_step(driver: Driver) -> None:
    for number in range(4):
        plain(steps=50).submit(driver, number)
    driver.step()
    plain(steps=2).submit(driver, 4)
    assert not ended(driver, 2)
    driver.abort(2)
    assert ended(driver, 2) == [4]
    abort(driver, 0, 1, 3)


def test_a_paused_request_gives_up_its_rows_and_goes_on_where_it_was(driver: Driver) -> None:
    request = plain(steps=4, seed=3)
    expected = request.alone(driver)
    for number in range(4):
        request.submit(driver, number)
    driver.step()
    driver.engine.pause(1)
    plain(steps=2).submit(driver, 4)
    assert ended(driver, 3) == [4, 0, 2, 3]
    assert not driver.engine.busy
    driver.engine.resume(1)
    assert_close(final(driver.run()[1]), expected)


def test_latents_that_are_not_finite_fail_their_own_request(driver: Driver) -> None:
    good, bad = plain(steps=3), plain(steps=3)
    expected = good.alone(driver)
    bad.prompt = torch.full((4, tiny.WIDTH), math.nan)
    bad.submit(driver, 1)
    good.submit(driver, 2)
    outputs = driver.run()
    assert [type(output) for output in outputs[1]] == [StageFailure]
    assert outputs[1][0].error.code == "output_not_finite"
    assert_close(final(outputs[2]), expected)


# outputs


def test_previews_come_every_k_steps_and_estimate_the_picture(driver: Driver) -> None:
    request = plain(steps=5, size="96x64")
    expected = request.alone(driver)
    request.params["previews"] = 2
    request.submit(driver)
    outputs = driver.run()[1]
    assert [(output.data, output.decisions, output.last) for output in outputs] == [
        ({"step": step, "total": 5, "final": step == 5, "width": 96, "height": 64}, (step,), step == 5)
        for step in (2, 4, 5)
    ]
    np.testing.assert_array_equal(final(outputs), expected)
    off = [np.abs(output.tensors["latents"] - expected).mean() for output in outputs]
    assert off[0] > off[1] > off[2], "each preview is nearer to the picture"


def test_progress_comes_every_k_steps_without_latents(driver: Driver) -> None:
    request = plain(steps=5, previews=3, progress=1)
    request.submit(driver)
    outputs = driver.run()[1]
    assert [output.data["step"] for output in outputs] == [1, 2, 3, 4, 5]
    assert [bool(output.tensors) for output in outputs] == [False, False, True, False, True]


def test_a_short_request_waits_two_steps_for_guided_ones_that_fill_the_batch(driver: Driver) -> None:
    for number in (1, 2):  # two rows each
        Request(states(5), states(3, 1), steps=50).submit(driver, number)
    assert not ended(driver, 3)
    plain(steps=4).submit(driver, 3)
    assert not ended(driver, 5)
    assert ended(driver, 1) == [3], "two steps without it, and four of its own"
    abort(driver, 1, 2)


def test_gauges_measure_the_pace(driver: Driver) -> None:
    plain(steps=2).alone(driver)
    figures = driver.engine.gauges()
    assert figures.keys() == {"running", "waiting", "steps_left", "step_seconds"}
    assert figures["step_seconds"] > 0
    assert not any(figures[name] for name in ("running", "waiting", "steps_left"))


# deaths


@pytest.mark.parametrize("died_after", range(1, 6))
def test_a_request_goes_on_from_its_checkpoint_at_every_step(driver: Driver, died_after: int) -> None:
    request = Request(states(5), states(3, 1), steps=6, previews=2)
    request.submit(driver, 1)
    expected = driver.run()[1]
    request.submit(driver, 2)
    before = [output for _ in range(died_after) for output in driver.step()]
    checkpoint = driver.checkpoints[2]
    driver.abort(2)
    assert checkpoint.data == {"step": died_after}
    for known in range(len(before) + 1):  # how many outputs some living process has
        journal = tuple(output.decisions for output in before[:known])
        request.submit(driver, 3, journal=journal, checkpoint=checkpoint)
        outputs: list[Any] = []
        steps = 0
        while driver.engine.busy:
            outputs += driver.step()
            steps += 1
        assert steps == 6 - died_after
        assert [(output.data, output.decisions) for output in outputs] == [(o.data, o.decisions) for o in expected]
        lost = [output.data["step"] for output in outputs if not output.tensors]
        assert lost == [step for step in (2, 4) if step <= died_after]
        for output, alike in zip(outputs, expected, strict=True):
            if output.tensors:
                np.testing.assert_array_equal(output.tensors["latents"], alike.tensors["latents"])


def test_a_request_from_a_picture_goes_on_from_its_checkpoint(driver: Driver) -> None:
    request = Request(states(5), None, (torch.randn(4, 16, 16),), strength=0.5, steps=8)
    expected = request.alone(driver)
    request.submit(driver, 2)
    driver.step()
    checkpoint = driver.checkpoints[2]
    driver.abort(2)
    request.submit(driver, 3, checkpoint=checkpoint)
    np.testing.assert_array_equal(final(driver.run()[3]), expected)


# refusals


@pytest.mark.parametrize(
    ("params", "param"),
    [
        ({"size": "0x64"}, "size"),
        ({"size": "63x64"}, "size"),
        ({"size": "64x4"}, "size"),
        ({"size": "136x128"}, "size"),
        ({"size": "99999x99999"}, "size"),
        ({"size": "1e9x64"}, "size"),
        ({"steps": 0}, "steps"),
        ({"steps": 101}, "steps"),
        ({"steps": 10_000}, "steps"),
        ({"guidance": math.nan}, "guidance"),
        ({"guidance": math.inf}, "guidance"),
        ({"strength": 0.0}, "strength"),
        ({"scheduler": "heun"}, "scheduler"),
        ({"previews": -1}, "previews"),
    ],
)
def test_parameters_out_of_bounds_are_refused_before_any_input(driver: Driver, params: Any, param: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        driver.start(1, (TEXT,), **params)
    assert refusal.value.param == param
    assert not driver.engine._requests


@pytest.mark.parametrize(
    ("request_", "param"),
    [
        (Request(states(17)), "prompt"),
        (Request(states(5), states(17)), "negative_prompt"),
        (Request(torch.zeros(5, 31)), "prompt"),
        (Request(torch.zeros(0, 32)), "prompt"),
        (Request(torch.zeros(5, 32, dtype=torch.int64)), "prompt"),
        (Request(states(5), strength=0.5), "strength"),
        (Request(states(5), steps=1), "steps"),
        (Request(states(5), None, (torch.zeros(4, 16, 16),), strength=1e-20), "strength"),
        (Request(states(5), None, (torch.zeros(4, 8, 8),)), "image"),
        (Request(states(5), None, (torch.zeros(4, 16, 16),) * 2), "image"),
        (Request(states(5), None, (torch.zeros(4, 16, 16),) * 4), "image"),
        (Request(states(5), None, (torch.zeros(3, 16, 16),)), "image"),
        (Request(states(5), None, (torch.zeros(4, 15, 16),)), "image"),
        (Request(states(5), None, (torch.zeros(4, 64, 64),)), "image"),
    ],
)
def test_input_out_of_bounds_is_refused(driver: Driver, request_: Request, param: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        request_.submit(driver)
    driver.abort(1)
    assert refusal.value.param == param
    assert not driver.engine._requests


def test_a_long_prompt_and_a_long_side_that_do_not_fit_together_are_refused(checkpoint: Path, open_stage: Any) -> None:
    """The transformer numbers the prompt's positions behind half of the longer side."""
    with closing(open_stage("qwen_image_denoiser", checkpoint)) as engine:
        driver = Driver(engine)
        with pytest.raises(InvalidRequest, match="at most 65488 pixels") as refusal:
            Request(states(3), size="65536x8").submit(driver)
        assert refusal.value.param == "size"


# weights


def test_new_weights_replace_the_old_ones(engine: DenoiserEngine, checkpoint: Path, tmp_path: Path) -> None:
    driver, request = Driver(engine), plain()
    before = request.alone(driver)
    other = tiny.save(tmp_path / "other", seed=1)

    def update(directory: Path) -> Any:
        return engine.call("update_weights", {"files": files(directory / "transformer"), "version": None})

    done = update(other)
    assert done == {"updated": len(load_file(weights_of(other))), "complete": True}
    with closing(type(engine)(_context(other))) as fresh:
        assert_close(request.alone(driver), request.alone(Driver(fresh)))
    request.submit(driver)
    with pytest.raises(InvalidRequest, match="running"):
        update(checkpoint)
    driver.abort(1)
    save_file({"unknown": torch.zeros(1)}, weights_of(other))
    with pytest.raises(InvalidRequest, match="unknown"):
        update(other)
    update(checkpoint)
    assert_close(request.alone(driver), before)


def test_a_checkpoint_that_lacks_weights_is_named(checkpoint: Path, tmp_path: Path) -> None:
    other = tiny.save(tmp_path / "other")
    tensors = load_file(weights_of(other))
    del tensors["img_in.weight"]
    save_file(tensors, weights_of(other))
    with pytest.raises(WrongCheckpoint, match=r"img_in\.weight"):
        DenoiserEngine(_context(other))


def test_each_row_has_its_own_adapter(driver: Driver, tmp_path: Path) -> None:
    targets = ["to_q", "add_v_proj", "img_mlp.net.2"]
    adapters = [
        save_adapter(tiny.transformer(), tmp_path / str(seed), seed=seed, target_modules=targets) for seed in (1, 2)
    ]
    requests = [plain(lora=lora) for lora in (None, *(adapter(each, each.name) for each in adapters))]
    alone = [request.alone(driver) for request in requests]
    plain_model = driver.engine._transformer._model
    for directory, expected in zip(adapters, alone[1:], strict=True):
        driver.engine._transformer._model = with_adapter(tiny.transformer(), directory)
        try:
            assert_close(plain().alone(driver), expected)
        finally:
            driver.engine._transformer._model = plain_model
    assert np.abs(alone[0] - alone[1]).max() > 1e-2 < np.abs(alone[1] - alone[2]).max()
    for number, request in enumerate(requests):
        request.submit(driver, number)
    outputs = driver.run()
    for number, expected in enumerate(alone):
        assert_close(final(outputs[number]), expected)
    assert not driver.engine._adapters.loaded


def test_rows_with_adapters_share_no_forward_that_has_two_timesteps_a_row(tmp_path: Path) -> None:
    directory = tiny.save_edit(tmp_path / "model", plus=True)
    tiny.transformer(zero_cond_t=True).save_pretrained(directory / "transformer")
    lora = save_adapter(tiny.transformer(zero_cond_t=True), tmp_path / "lora", seed=1, target_modules=["img_mod.1"])
    picture = torch.randn(tiny.CHANNELS, 8, 8, generator=torch.Generator().manual_seed(9))
    adapters = [adapter(lora), None, adapter(lora), None]
    requests = [
        Request(states(5, seed), pictures=(picture,), seed=seed, size="32x32", lora=each)
        for seed, each in enumerate(adapters)
    ]
    with closing(DenoiserEngine(_context(directory))) as engine:
        driver = Driver(engine)
        alone = [request.alone(driver) for request in requests]
        for number, request in enumerate(requests):
            request.submit(driver, number)
        outputs = driver.run()
    for number, expected in enumerate(alone):
        assert_close(final(outputs[number]), expected)


def files(directory: Path) -> dict[str, tuple[int, int]]:
    return {str(path): (path.stat().st_size, path.stat().st_mtime_ns) for path in directory.glob("*.safetensors")}


def weights_of(directory: Path) -> Path:
    return directory / "transformer" / "diffusion_pytorch_model.safetensors"


def _context(model: Path) -> Any:
    from tests.support.stage_context import stage_context

    return stage_context(OPTIONS, model=model)
