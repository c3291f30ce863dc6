"""What the engine does not load: code of a directory, other weights than safetensors, damaged or missing files."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from omni_actors.stages.base import StageEngine
from omni_actors.stages.diffusers.loading import WrongPipeline
from tiny_models import diffusers_pipelines as tiny

pytestmark = [pytest.mark.voice, pytest.mark.filterwarnings("ignore::FutureWarning")]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("whole"))


@pytest.fixture
def directory(whole: Path, tmp_path: Path) -> Path:
    """A pipeline to spoil."""
    return Path(shutil.copytree(whole, tmp_path / "pipeline"))


def change_index(directory: Path, **changes: Any) -> None:
    file = directory / "model_index.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


CODE = "raise SystemExit('code of the directory ran')\n"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"_class_name": "NoSuchPipeline"}, "no pipeline 'NoSuchPipeline'"),
        ({"_class_name": "UNet2DConditionModel"}, "no pipeline 'UNet2DConditionModel'"),
        ({"_class_name": ["pipeline", "Mine"]}, "not run"),
        ({"_class_name": None}, "not run"),
        ({"_class_name": "DDPMPipeline"}, "makes no pictures from a prompt"),
        ({"_class_name": "StableAudioPipeline"}, "makes no pictures from a prompt"),
        ({"_class_name": "VQDiffusionPipeline"}, "NoSuch|makes no pictures|call back"),
        ({"unet": ["mine", "UNet"]}, "unet needs code from 'mine'"),
        ({"unet": ["os", "system"]}, "unet needs code from 'os'"),
    ],
)
def test_the_index_of_a_pipeline_that_cannot_run_here(
    directory: Path, changes: dict[str, Any], reason: str, open_stage: Callable[..., StageEngine]
) -> None:
    for name in ("pipeline.py", "mine.py", "unet/mine.py"):
        (directory / name).write_text(CODE)
    change_index(directory, **changes)
    with pytest.raises(WrongPipeline, match=reason):
        open_stage("diffusers", directory)


@pytest.mark.parametrize("text", ["", "{", "[]"])
def test_an_index_that_is_none(directory: Path, text: str, open_stage: Callable[..., StageEngine]) -> None:
    (directory / "model_index.json").write_text(text)
    with pytest.raises(WrongPipeline, match=r"model_index\.json"):
        open_stage("diffusers", directory)


def test_no_index(tmp_path: Path, open_stage: Callable[..., StageEngine]) -> None:
    with pytest.raises(WrongPipeline, match=r"there is no model_index\.json"):
        open_stage("diffusers", tmp_path)


@pytest.mark.parametrize("part", ["unet/diffusion_pytorch_model", "text_encoder/model"])
def test_a_truncated_file_is_named(directory: Path, part: str, open_stage: Callable[..., StageEngine]) -> None:
    file = directory / f"{part}.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(WrongPipeline, match=f"{part}.*damaged"):
        open_stage("diffusers", directory)


@pytest.mark.parametrize("part", ["unet/diffusion_pytorch_model", "text_encoder/model"])
def test_weights_in_another_format_are_not_read(
    directory: Path, part: str, open_stage: Callable[..., StageEngine]
) -> None:
    file = directory / f"{part}.safetensors"
    other = {"unet": "diffusion_pytorch_model.bin", "text_encoder": "pytorch_model.bin"}[file.parent.name]
    file.rename(file.with_name(other))
    with pytest.raises(OSError, match=r"safetensors"):
        open_stage("diffusers", directory)


def test_missing_weights_are_named(directory: Path, open_stage: Callable[..., StageEngine]) -> None:
    from safetensors.torch import load_file, save_file

    file = directory / "unet/diffusion_pytorch_model.safetensors"
    tensors = load_file(file)
    del tensors["conv_in.bias"]
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises((WrongPipeline, ValueError), match=r"conv_in\.bias"):
        open_stage("diffusers", directory)
