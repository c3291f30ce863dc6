"""New weights for the parts of omni models: equal to a part that was loaded with them, or refused without a change."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from omni_actors.errors import InvalidRequest
from omni_actors.stages.weights import checkpoint_files
from tests.support import engine_cases
from tests.support.closeness import assert_same_results
from tests.support.engine_driver import Driver
from tiny_models import qwen2_5, qwen3

# They need the libraries of the extra. The weights are random.
pytestmark = [pytest.mark.voice, pytest.mark.usefixtures("clear_choices")]

Checkpoints = Mapping[str, tuple[Path, Path]]
SEEDS = {"qwen3": (25, 2), "qwen2_5": (0, 5)}
OPTIONS: Mapping[str, Mapping[str, Any]] = {"qwen2_5_token2wav": {"steps": 2}}
ENGINES = [
    *("qwen3_thinker", "qwen3_talker", "qwen3_code2wav"),
    *("qwen2_5_thinker", "qwen2_5_talker", "qwen2_5_token2wav"),
]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    """Return the old and the new checkpoint of each family, whose speakers are the same."""
    made = {}
    for name, save in (("qwen3", qwen3.save), ("qwen2_5", qwen2_5.save)):
        old, new = (save(tmp_path_factory.mktemp(name), seed=seed) for seed in SEEDS[name])
        made[name] = old, new
    old, new = made["qwen2_5"]
    shutil.copyfile(old / "spk_dict.pt", new / "spk_dict.pt")
    return made


def of(name: str, checkpoints: Checkpoints) -> tuple[Path, Path]:
    return checkpoints[name.rpartition("_")[0]]


def update(engine: Any, directory: Path) -> Any:
    return engine.call("update_weights", {"files": checkpoint_files(directory), "version": "new"})


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.slow
def test_an_engine_with_new_weights_computes_as_one_that_was_loaded_with_them(
    name: str, checkpoints: Checkpoints, open_stage: Callable[..., Any], request: pytest.FixtureRequest
) -> None:
    old, new = of(name, checkpoints)
    case, options = getattr(engine_cases, name)(request), OPTIONS.get(name, {})

    def computed(engine: Any) -> Any:
        return case.normalise(case.alone(Driver(engine), 1, 0))

    with closing(open_stage(name, new, **options)) as engine:
        expected = computed(engine)
    with closing(open_stage(name, old, **options)) as engine:
        before = computed(engine)
        assert not same(before, expected)
        assert update(engine, new)["complete"]
        assert_same_results(computed(engine), expected)
        assert update(engine, old)["complete"]
        assert_same_results(computed(engine), before)


def same(one: Any, other: Any) -> bool:
    try:
        assert_same_results(one, other)
    except AssertionError:
        return False
    return True


def test_some_of_the_tensors_and_those_of_other_parts(
    checkpoints: Checkpoints, open_stage: Callable[..., Any], tmp_path: Path
) -> None:
    old, new = checkpoints["qwen3"]
    tensors = load_file(new / "model.safetensors")
    (name, *_) = (name for name in tensors if name.startswith("code2wav.") and name.endswith("q_proj.weight"))
    save_file(
        {name: tensors[name], **{each: tensors[each] for each in tensors if "talker" in each}},
        tmp_path / "a.safetensors",
    )
    with closing(open_stage("qwen3_code2wav", old)) as engine:
        before = {key: value.clone() for key, value in engine._model.state_dict().items()}
        assert update(engine, tmp_path) == {"updated": 1, "complete": False}
        after = engine._model.state_dict()
        changed = [key for key, value in before.items() if not torch.equal(value, after[key])]
        assert changed == [name.removeprefix("code2wav.")]
        np.testing.assert_array_equal(after[changed[0]].cpu(), tensors[name])


def test_weights_that_do_not_fit_change_nothing(
    checkpoints: Checkpoints, open_stage: Callable[..., Any], tmp_path: Path
) -> None:
    old, new = checkpoints["qwen3"]
    good = load_file(new / "model.safetensors")
    own = {name: tensor for name, tensor in good.items() if name.startswith("thinker.")}
    name = "thinker.lm_head.weight"
    expert = next(each for each in own if ".experts.0." in each)
    with closing(open_stage("qwen3_thinker", old)) as engine:
        before = {key: value.clone() for key, value in engine._model.state_dict().items()}
        for bad, message in (
            ({**own, "thinker.nothing": torch.zeros(2)}, "no weights 'thinker.nothing'"),
            ({**own, "model.nothing": torch.zeros(2)}, "no weights 'model.nothing'"),
            ({**own, name: own[name][:1].clone()}, "found"),
            ({**own, name: own[name].to(torch.int8)}, "floating-point"),
            ({each: good[each] for each in good if each.startswith("talker.")}, "no weights of the part"),
            ({expert: own[expert]}, "do not fit"),
        ):
            save_file(bad, tmp_path / "bad.safetensors")
            with pytest.raises(InvalidRequest, match=message):
                update(engine, tmp_path)
        after = engine._model.state_dict()
        assert all(torch.equal(value, after[key]) for key, value in before.items())


def test_running_requests_keep_their_weights(
    checkpoints: Checkpoints, open_stage: Callable[..., Any], request: pytest.FixtureRequest
) -> None:
    old, new = checkpoints["qwen3"]
    with closing(open_stage("qwen3_talker", old)) as engine:
        driver = Driver(engine)
        engine_cases.qwen3_talker(request).start(driver, 1)
        with pytest.raises(InvalidRequest) as refused:
            update(engine, new)
        assert refused.value.code == "busy"
        driver.abort(1)
