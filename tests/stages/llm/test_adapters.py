"""LoRA adapters of the llm engine: they compute what PEFT computes, and each row of a batch has its own."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from omni_actors.errors import InvalidAdapter
from omni_actors.stages.adapters import files
from omni_actors.stages.adapters.options import Adapter
from omni_actors.stages.llm.engine import LLMEngine
from tests.stages.llm.tiny_engine import PROMPTS, Results, answer, assert_empty, decoded, opened, submit, user
from tests.support.adapters import adapter, save_adapter, with_adapter
from tests.support.closeness import assert_close

KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "rslora": {"use_rslora": True, "r": 8},
    "patterns": {"rank_pattern": {"q_proj": 2, "layers.1.mlp.down_proj": 6}, "alpha_pattern": {"v_proj": 5}},
    "half": {"target_modules": ["k_proj", "o_proj", "gate_proj", "up_proj"]},
}


@pytest.fixture(scope="module")
def adapters(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The directory of each kind of adapter."""
    folder = tmp_path_factory.mktemp("adapters")
    return {
        kind: save_adapter(AutoModelForCausalLM.from_pretrained(tiny), folder / kind, seed=seed, **config)
        for seed, (kind, config) in enumerate(KINDS.items())
    }


@pytest.fixture(scope="module")
def expected(tiny: Path, adapters: dict[str, Path]) -> Callable[[str | None, str], str]:
    """PEFT's greedy answer of 8 tokens to a prompt, by kind of adapter; None: the model alone."""
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    models: dict[str | None, Any] = {None: AutoModelForCausalLM.from_pretrained(tiny)}

    def ask(kind: str | None, prompt: str) -> str:
        if kind is not None and kind not in models:
            models[kind] = with_adapter(AutoModelForCausalLM.from_pretrained(tiny), adapters[kind])
        batch = tokenizer.apply_chat_template(
            user(prompt)["messages"], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        tokens = models[kind].generate(**batch, max_new_tokens=8, do_sample=False)[0].tolist()
        return decoded(tiny, tokens[batch["input_ids"].shape[1] :])

    return ask


@pytest.fixture
def fresh(tiny: Path) -> Iterator[LLMEngine]:
    with closing(opened(tiny, idle_loras=1)) as engine:
        yield engine
        assert_empty(engine)


def keep(engine: LLMEngine, *adapters: Adapter, pinned: tuple[str, ...] = ()) -> None:
    engine.call("keep_loras", {"adapters": [msgspec.to_builtins(each) for each in adapters], "pinned": pinned})


def load(engine: LLMEngine, adapter: Adapter) -> None:
    engine.call("load_lora", {"adapter": msgspec.to_builtins(adapter)})


@pytest.mark.usefixtures("clear_choices")
@pytest.mark.parametrize("kind", KINDS)
def test_an_adapter_answers_as_peft_does(
    engine: LLMEngine, adapters: dict[str, Path], expected: Callable[..., str], kind: str
) -> None:
    found, _ = answer(engine, PROMPTS[2], max_tokens=8, lora=adapter(adapters[kind]))
    assert found == expected(kind, PROMPTS[2])
    assert found != expected(None, PROMPTS[2])


@pytest.mark.usefixtures("clear_choices")
def test_each_row_of_a_batch_has_its_own_adapter(
    engine: LLMEngine, adapters: dict[str, Path], expected: Callable[..., str]
) -> None:
    kinds = [None, "plain", "rslora", "plain", "half"]
    for number, kind in enumerate(kinds):
        lora = adapter(adapters[kind], kind) if kind else None
        submit(engine, number, PROMPTS[number], max_tokens=8, lora=lora)
    results = Results().run(engine)
    assert [results.text(n) for n in range(5)] == [expected(kind, PROMPTS[n]) for n, kind in enumerate(kinds)]


def test_the_logits_are_those_of_peft(tiny: Path, adapters: dict[str, Path]) -> None:
    with closing(opened(tiny)) as engine, torch.inference_mode():
        lora = adapter(adapters["patterns"])
        reference = with_adapter(AutoModelForCausalLM.from_pretrained(tiny), adapters["patterns"])
        ids = torch.arange(3, 15).reshape(2, 6)
        theirs = ids.to(engine._model.device)
        engine._adapters.use(lora, ())
        plain = engine._model(input_ids=theirs).logits
        with engine._adapters.applied([lora, lora]):
            found = engine._model(input_ids=theirs).logits
        with engine._adapters.applied([None, lora]):
            mixed = engine._model(input_ids=theirs).logits
        expected = reference(input_ids=ids).logits
        assert_close(found, expected)
        assert_close(mixed[1], expected[1])
        assert_close(mixed[0], plain[0])
        assert (plain - expected).abs().max() > 0.1


@pytest.mark.usefixtures("clear_choices")
def test_a_removed_adapter_serves_its_requests_to_the_end(
    fresh: LLMEngine, adapters: dict[str, Path], expected: Callable[..., str]
) -> None:
    one, other = (adapter(adapters[kind], "same") for kind in ("plain", "rslora"))
    keep(fresh, one)
    submit(fresh, 1, PROMPTS[0], max_tokens=8, lora=one)
    results = Results()
    results.step(fresh)
    keep(fresh, other)
    submit(fresh, 2, PROMPTS[0], max_tokens=8, lora=other)
    assert {*fresh._adapters.loaded} == {one, other}
    results.run(fresh)
    assert [results.text(1), results.text(2)] == [expected(kind, PROMPTS[0]) for kind in ("plain", "rslora")]
    assert {*fresh._adapters.loaded} == {other}
    keep(fresh)
    assert not fresh._adapters.loaded
    assert not fresh._adapters._hooks


def test_idle_adapters_are_freed_but_not_pinned_ones(fresh: LLMEngine, adapters: dict[str, Path]) -> None:
    first, second, third = (adapter(adapters[kind], kind) for kind in ("plain", "rslora", "half"))
    keep(fresh, first, second)
    assert [*fresh._adapters.loaded] == [second]
    keep(fresh, first, second, third, pinned=("plain",))
    assert {*fresh._adapters.loaded} == {first, third}
    answer(fresh, "x", max_tokens=1, lora=second)
    assert {*fresh._adapters.loaded} == {first, second}


def test_a_new_engine_loads_no_more_adapters_than_may_be_idle(
    fresh: LLMEngine, adapters: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have no memory for all of them at once."""
    read = list[str]()
    monkeypatch.setattr(
        files, "read_again", lambda each, original=files.read_again: read.append(each.name) or original(each)
    )
    keep(fresh, *(adapter(adapters[kind], kind) for kind in KINDS), pinned=("plain",))
    assert {*read} == {"plain", [*KINDS][-1]}
    assert {each.name for each in fresh._adapters.loaded} == {*read}


def test_a_changed_adapter_is_refused(
    fresh: LLMEngine, adapters: dict[str, Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    directory = shutil.copytree(adapters["plain"], tmp_path / "changed")
    lora = adapter(directory)
    shutil.copytree(adapters["rslora"], directory, dirs_exist_ok=True)
    with pytest.raises(InvalidAdapter, match="have changed since it was added"):
        submit(fresh, 1, "x", lora=lora)
    keep(fresh, lora)
    assert "have changed" in capfd.readouterr().err
    assert not fresh._adapters.loaded


def test_a_name_that_the_parent_did_not_replace_is_refused(fresh: LLMEngine) -> None:
    with pytest.raises(InvalidAdapter, match="no adapter of this name"):
        submit(fresh, 1, "x", lora="unknown")


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "kind": ({"peft_type": "IA3"}, "peft_type"),
    "bias": ({"bias": "all"}, "bias"),
    "dora": ({"use_dora": True}, "use_dora"),
    "saved modules": ({"modules_to_save": ["embed_tokens"]}, "modules_to_save"),
    "pissa": ({"init_lora_weights": "pissa"}, "init_lora_weights"),
    "unknown": ({"a_later_invention": {"x": 1}}, "a_later_invention"),
    "no rank": ({"r": 0}, "rank 0"),
    "another rank": ({"r": 3}, r"found torch.float32 \(4, "),
    "no number": ({"lora_alpha": "much"}, "lora_alpha"),
    "no pattern": ({"rank_pattern": {"(": 3}}, "adapter_config.json"),
    "no part of a pattern": ({"alpha_pattern": {"(?i)Q_PROJ": 3}}, "adapter_config.json"),
    "a huge count": ({"rank_pattern": {"a{99999999999}": 3}}, "adapter_config.json"),
    "a deep pattern": ({"rank_pattern": {"(" * 3000 + ")" * 3000: 3}}, "adapter_config.json"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_configuration_that_would_be_ignored_is_refused(
    fresh: LLMEngine, adapters: dict[str, Path], tmp_path: Path, name: str
) -> None:
    changes, match = WRONG[name]
    directory = shutil.copytree(adapters["plain"], tmp_path / "wrong")
    config = json.loads((directory / "adapter_config.json").read_text())
    (directory / "adapter_config.json").write_text(json.dumps({**config, **changes}))
    with pytest.raises(InvalidAdapter, match=match):
        load(fresh, adapter(directory))
    assert not fresh._adapters.loaded


def _rename(tensors: dict[str, Any]) -> dict[str, Any]:
    return {name.replace("q_proj", "query"): tensor for name, tensor in tensors.items()}


def _cut(tensors: dict[str, Any]) -> dict[str, Any]:
    return {name: tensor[:, :-1].contiguous() if "lora_A" in name else tensor for name, tensor in tensors.items()}


def _halve(tensors: dict[str, Any]) -> dict[str, Any]:
    return {name: tensor for name, tensor in tensors.items() if "lora_A" in name}


def _spoil(tensors: dict[str, Any]) -> dict[str, Any]:
    return {name: tensor * float("nan") for name, tensor in tensors.items()}


def _add_embedding(tensors: dict[str, Any]) -> dict[str, Any]:
    return {**tensors, "base_model.model.model.embed_tokens.lora_embedding_A": torch.zeros(4, 2)}


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (_rename, "no linear layer 'model.layers.0.self_attn.query'"),
        (_cut, r"accepted: floats \(4, "),
        (_halve, "lora_B.weight' is missing"),
        (_spoil, "not finite"),
        (_add_embedding, "no update of a linear layer"),
        (lambda tensors: {}, "no weights"),
    ],
)
def test_weights_that_do_not_fit_the_model_are_refused(
    fresh: LLMEngine, adapters: dict[str, Path], tmp_path: Path, change: Callable[..., Any], match: str
) -> None:
    directory = shutil.copytree(adapters["plain"], tmp_path / "wrong")
    file = directory / "adapter_model.safetensors"
    save_file(change(load_file(file)), file)
    with pytest.raises(InvalidAdapter, match=match):
        load(fresh, adapter(directory))
    assert not fresh._adapters.loaded


def test_a_torn_file_is_refused(fresh: LLMEngine, adapters: dict[str, Path], tmp_path: Path) -> None:
    directory = shutil.copytree(adapters["plain"], tmp_path / "torn")
    file = directory / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-7])
    with pytest.raises(InvalidAdapter, match=r"adapter_model\.safetensors"):
        load(fresh, adapter(directory))


def test_numbers_of_a_type_that_torch_lacks_are_refused(
    fresh: LLMEngine, adapters: dict[str, Path], tmp_path: Path
) -> None:
    directory = shutil.copytree(adapters["plain"], tmp_path / "types")
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    header = json.dumps({name: {"dtype": "F4", "shape": [4, 8], "data_offsets": [0, 16]}}).encode()
    (directory / "adapter_model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(16))
    with pytest.raises(InvalidAdapter, match=r"adapter_model\.safetensors"):
        load(fresh, adapter(directory))


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidAdapter, match=r"adapter_config\.json: No such file"):
        adapter(tmp_path)


@pytest.mark.parametrize("name", [files.CONFIG, files.WEIGHTS])
def test_a_pipe_or_a_device_in_place_of_a_file_is_refused(adapters: dict[str, Path], tmp_path: Path, name: str) -> None:
    """A pipe would be waited for without end, and a device read."""
    directory = shutil.copytree(adapters["plain"], tmp_path / "pipe")
    for place in (os.mkfifo, lambda path: path.symlink_to("/dev/zero")):
        (directory / name).unlink()
        place(directory / name)
        with pytest.raises(InvalidAdapter, match=f"{name}: not a regular file"):
            files.read(str(directory))
