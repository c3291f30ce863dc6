"""New weights for the llm engine: equal to a model that was loaded with them, or refused without a change."""

from __future__ import annotations

import shutil
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from omni_actors.errors import InvalidRequest
from omni_actors.stages.llm.engine import LLMEngine
from tests.stages.llm.tiny_engine import PROMPTS, answer, opened, submit
from tiny_models.llama import save_model

pytestmark = pytest.mark.usefixtures("clear_choices")


def files(*paths: Path) -> dict[str, tuple[int, int]]:
    return {str(path): (path.stat().st_size, path.stat().st_mtime_ns) for path in paths}


def update(engine: LLMEngine, named: dict[str, tuple[int, int]]) -> Any:
    return engine.call("update_weights", {"files": named, "version": "new"})


@pytest.mark.parametrize("tied", [False, True])
def test_an_engine_with_new_weights_answers_as_one_that_was_loaded_with_them(tmp_path: Path, *, tied: bool) -> None:
    old = save_model(tmp_path / "old", seed=1, tie_word_embeddings=tied)
    new = save_model(tmp_path / "new", seed=2, tie_word_embeddings=tied)
    with closing(opened(new)) as engine:
        expected = answer(engine, PROMPTS[0], max_tokens=20)
    with closing(opened(old, prefix_cache_mb=16)) as engine:
        before = answer(engine, PROMPTS[0], max_tokens=20)
        assert before != expected
        tensors = load_file(new / "model.safetensors")
        assert update(engine, files(new / "model.safetensors")) == {
            "updated": len(tensors) + tied,
            "complete": True,
        }
        assert answer(engine, PROMPTS[0], max_tokens=20) == expected
        update(engine, files(old / "model.safetensors"))
        assert answer(engine, PROMPTS[0], max_tokens=20) == before


def test_some_of_the_tensors_from_several_files(tmp_path: Path) -> None:
    old, new = save_model(tmp_path / "old", seed=1), save_model(tmp_path / "new", seed=2)
    tensors = load_file(new / "model.safetensors")
    halves = [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]
    names = sorted(tensors)
    for path, part in zip(halves, (names[::2], names[1::2]), strict=True):
        save_file({name: tensors[name] for name in part}, path)
    with closing(opened(new)) as engine:
        expected = answer(engine, PROMPTS[0], max_tokens=20)
    with closing(opened(old)) as engine:
        assert update(engine, files(halves[0]))["complete"] is False
        assert update(engine, files(halves[1]))["updated"] == len(names[1::2])
        assert answer(engine, PROMPTS[0], max_tokens=20) == expected


def test_weights_that_do_not_fit_change_nothing(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", seed=1)
    good = load_file(save_model(tmp_path / "other", seed=2) / "model.safetensors")
    name = next(iter(good))
    path = tmp_path / "new.safetensors"
    with closing(opened(model)) as engine:
        before = answer(engine, PROMPTS[0], max_tokens=20)
        for bad, message in (
            ({**good, "model.nothing": torch.zeros(2)}, "no weights 'model.nothing'"),
            ({**good, name: good[name][:1].clone()}, "found"),
            ({**good, name: good[name].to(torch.int8)}, "floating-point"),
        ):
            save_file(bad, path)
            with pytest.raises(InvalidRequest, match=message):
                update(engine, files(path))
        save_file(good, path)
        named = files(path)
        shutil.copyfile(model / "model.safetensors", path)
        with pytest.raises(InvalidRequest, match="has changed"):
            update(engine, named)
        path.write_bytes(b"not safetensors")
        with pytest.raises(InvalidRequest, match="new"):
            update(engine, files(path))
        path.unlink()
        with pytest.raises(InvalidRequest, match="No such file"):
            update(engine, named)
        assert answer(engine, PROMPTS[0], max_tokens=20) == before


def test_running_requests_keep_their_weights(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", seed=1)
    with closing(opened(model)) as engine:
        submit(engine, 1, PROMPTS[0], max_tokens=2)
        with pytest.raises(InvalidRequest) as refused:
            update(engine, files(model / "model.safetensors"))
        assert refused.value.code == "busy"
        engine.abort(1)
