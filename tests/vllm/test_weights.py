"""New weights for the engines on vLLM: equal to an engine that was loaded with them, or refused without a change."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from omni_actors.errors import InvalidRequest
from omni_actors.stages.weights import checkpoint_files
from omni_actors.system.weight_memory import WeightMemory
from tests.support.closeness import assert_same_results
from tests.support.conformance import chunks
from tests.support.engine_driver import Driver
from tests.support.omni_questions import STORY, Ask
from tiny_models import llama
from tiny_models import vllm as tiny

HEADS = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
SAVE: dict[str, Callable[..., Path]] = {
    "vllm": functools.partial(llama.save_model, **HEADS),
    "vllm_qwen2_5_thinker": tiny.qwen2_5,
}
ARGUMENTS = {"enable_prefix_caching": True, "max_model_len": 128, "logits_processors": []}


def update(engine: Any, path: Path) -> Any:
    """path: of a directory, or of a file in memory."""
    status = path.stat()
    files = checkpoint_files(path) if path.is_dir() else {str(path): (status.st_size, status.st_mtime_ns)}
    return engine.call("update_weights", {"files": files, "version": "new"})


def computed(engine: Any) -> Any:
    driver = Driver(engine)
    driver.start(1, max_tokens=16, temperature=0.0, ignore_eos=True)
    driver.feed(1, *Ask(STORY).chunks[0], last=True)
    return chunks(driver.run()[1])


@pytest.mark.parametrize("name", SAVE)
def test_an_engine_with_new_weights_computes_as_one_that_was_loaded_with_them(
    name: str, open_stage: Callable[..., Any], tmp_path: Path
) -> None:
    old, new = (SAVE[name](tmp_path / str(seed), seed=seed) for seed in (1, 2))
    options = {"engine_args": ARGUMENTS} if name == "vllm" else {}
    with closing(open_stage(name, new, **options)) as engine:
        expected = computed(engine)
    with closing(open_stage(name, old, **options)) as engine:
        before = computed(engine)
        assert [data for data, _, _ in before] != [data for data, _, _ in expected]
        check_refusals(engine, load_file(new / "model.safetensors"), tmp_path / "bad")
        assert_same_results(computed(engine), before)
        assert update(engine, new)["complete"]
        assert_same_results(computed(engine), expected)
        in_memory = WeightMemory().write(load_file(old / "model.safetensors"))
        assert update(engine, in_memory)["complete"]
        assert_same_results(computed(engine), before)


def check_refusals(engine: Any, good: dict[str, torch.Tensor], directory: Path) -> None:
    directory.mkdir()
    name = next(each for each in good if each.endswith("q_proj.weight"))
    for bad, message in (
        ({**good, "thinker.nothing": torch.zeros(2)}, "no weights"),
        ({**good, name: good[name][:1].clone()}, "found"),
        ({each: good[each] for each in good if each != name and "q_proj" in each}, "lack"),
    ):
        save_file(bad, directory / "bad.safetensors")
        with pytest.raises(InvalidRequest, match=message):
            update(engine, directory)
