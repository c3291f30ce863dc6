"""The paths that workers are given: on another node they start in another working directory than the parent's."""

from __future__ import annotations

from pathlib import Path

import pytest

from omni_actors import Pipeline
from omni_actors.config import Stage
from omni_actors.system.machine import resolve_models
from omni_actors.system.workers import worker_specs


def test_a_model_that_is_named_relative_to_the_working_directory_has_an_absolute_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("mine", "words"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path)
    stage = Stage(engine="echo", model="mine", tokenizer="words", accepts=("script",), emits="text")
    pipeline = Pipeline(name="relative", stages={"mind": stage})
    [spec] = worker_specs(pipeline, resolve_models(pipeline), ["mind"])
    assert (spec.model, spec.tokenizer) == (str(tmp_path / "mine"), str(tmp_path / "words"))
