"""LoRA adapters of the engines on vLLM, against the ``llm`` engine, whose adapters compute what PEFT's do."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from omni_actors.errors import InvalidAdapter, InvalidRequest
from omni_actors.stages.adapters.files import CONFIG, WEIGHTS
from omni_actors.stages.adapters.options import Adapter
from omni_actors.stages.base import Decisions
from tests.support.adapters import adapter, write_adapter
from tests.support.engine_driver import Driver

TARGETS = ["q_proj", "v_proj", "o_proj", "down_proj"]
QUESTION = "Name three colours."


@pytest.fixture(scope="module")
def adapters(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Adapter]:
    folder = tmp_path_factory.mktemp("adapters")
    made = {name: write_adapter(folder / name, smollm2, TARGETS, seed=seed) for seed, name in enumerate("abcd")}
    return [adapter(directory, name) for name, directory in made.items()]


@pytest.fixture(scope="module")
def driver(open_stage: Callable[..., Any]) -> Iterator[Driver]:
    lora = {"enable_lora": True, "max_loras": 2, "max_cpu_loras": 3, "max_lora_rank": 8}
    with closing(open_stage("vllm", engine_args=lora)) as engine:
        yield Driver(engine)


def ask(driver: Driver, number: int, lora: Adapter | None, journal: tuple[Decisions, ...] = ()) -> None:
    driver.start(number, max_tokens=12, lora=lora and msgspec.to_builtins(lora), journal=journal)
    driver.feed(number, {"messages": [{"role": "user", "content": QUESTION}]}, last=True)


def texts(outputs: dict[int, list[Any]]) -> dict[int, str]:
    return {number: "".join(each.data.get("text", "") for each in those) for number, those in outputs.items()}


def keep(driver: Driver, *adapters: Adapter, pinned: tuple[str, ...] = ()) -> None:
    arguments = {"adapters": [msgspec.to_builtins(each) for each in adapters], "pinned": pinned}
    driver.engine.call("keep_loras", arguments)  # type: ignore[attr-defined]


@pytest.mark.usefixtures("clear_choices")
def test_each_request_of_a_batch_has_its_own_adapter(
    driver: Driver, drive: Callable[..., Driver], adapters: list[Adapter]
) -> None:
    """vLLM has four adapters, two slots and memory for three: some requests wait, and it loads adapters again."""
    ours, asked = drive("llm"), [None, *adapters, *adapters[::-1], None]
    for each in (ours, driver):
        for number, lora in enumerate(asked):
            ask(each, number, lora)
    expected = texts(ours.run())
    assert len(set(expected.values())) == 5, "each adapter gives another answer"
    assert texts(driver.run()) == expected


def test_resumed_requests_keep_their_adapters(driver: Driver, adapters: list[Adapter]) -> None:
    """Their decided tokens are computed with the adapter of each, in one prefill beside each other."""
    asked = dict(enumerate([None, *adapters]))
    for number, lora in asked.items():
        ask(driver, number, lora)
    whole = driver.run()
    engine: Any = driver.engine
    before = engine.gauges()["generation_tokens"]
    for number, lora in asked.items():
        ask(driver, number, lora, tuple(output.decisions for output in whole[number][: 5 + number]))
    assert texts(driver.run()) == texts(whole)
    again = sum(outputs[-1].data["completion_tokens"] for outputs in whole.values()) - (5 + 6 + 7 + 8 + 9)
    assert engine.gauges()["generation_tokens"] - before == again


def test_adapters_are_kept_and_removed(driver: Driver, adapters: list[Adapter]) -> None:
    engine: Any = driver.engine
    assert engine.capabilities()["load_lora"] is None
    keep(driver, *adapters[:2])
    assert {*engine._adapters.loaded} == {*adapters[:2]}
    assert len(engine._llm.list_loras()) == 2
    ask(driver, 1, adapters[2])
    driver.step()
    keep(driver)
    assert {*engine._adapters.loaded} == {adapters[2]}
    driver.run()
    assert not engine._llm.list_loras(), "it ends with its last request"


def test_a_pinned_adapter_stays_in_memory_beside_a_batch_of_others(driver: Driver, adapters: list[Adapter]) -> None:
    """The batch has as many other adapters as vLLM has slots, and then more that push these out of memory."""
    engine: Any = driver.engine
    others = [adapters[1], adapters[2], adapters[3], adapters[1]]
    for number, lora in enumerate(others):
        ask(driver, number, lora)
    expected = texts(driver.run())
    keep(driver, *adapters, pinned=("a",))
    pinned = engine._adapters.name_of(adapters[0]).lora_int_id
    for number, lora in enumerate(others):
        ask(driver, number, lora)
    found: dict[int, list[Any]] = {}
    while driver.engine.busy:
        for output in driver.step():
            found.setdefault(output.request_id, []).append(output)
        assert pinned in engine._llm.list_loras()
    assert texts(found) == expected
    keep(driver, *adapters)
    for number, lora in enumerate(others):
        ask(driver, number, lora)
    assert texts(driver.run()) == expected
    assert pinned not in engine._llm.list_loras(), "it is pinned no more, and was not used"
    keep(driver)


def test_more_pins_than_vllm_has_memory_beside_a_batch_are_refused(driver: Driver, adapters: list[Adapter]) -> None:
    why = r"2 pinned adapters .*; engine_args.max_cpu_loras is 3, and max_loras is 2"
    with pytest.raises(InvalidRequest, match=why) as refused:
        keep(driver, *adapters, pinned=("a", "b"))
    assert refused.value.param == "pinned"
    keep(driver)


def test_an_adapter_that_was_pinned_gives_way_when_its_last_request_ends(
    driver: Driver, adapters: list[Adapter]
) -> None:
    """It is removed while a request uses it, and another one is pinned before that request ends."""
    engine: Any = driver.engine
    keep(driver, adapters[0], pinned=("a",))
    ask(driver, 1, adapters[0])
    keep(driver)
    keep(driver, *adapters[1:3], pinned=("b",))
    driver.run()
    assert {*engine._adapters.loaded} == {*adapters[1:3]}
    for number, lora in enumerate(adapters[1:3]):
        ask(driver, number, lora)
    assert all(texts(driver.run()).values())
    keep(driver)


def test_what_vllm_cannot_load_is_refused(
    driver: Driver, smollm2: Path, tmp_path: Path, adapters: list[Adapter]
) -> None:
    large = adapter(write_adapter(tmp_path / "large", smollm2, TARGETS, rank=16))
    for wrong, why in ((large, "rank 16"), (Adapter("a", adapters[0].directory, "0"), "have changed")):
        with pytest.raises(InvalidAdapter, match=why):
            ask(driver, 1, wrong)
    assert not driver.engine._requests  # type: ignore[attr-defined]
    driver.live.clear()


WRONG: dict[str, tuple[Callable[[dict[str, Tensor], str], object], str]] = {
    "missing": (lambda tensors, name: tensors.pop(name), "is missing"),
    "narrow": (lambda tensors, name: tensors.update({name: torch.zeros(4, 3)}), r"found torch.float32 \(4, 3\)"),
    "no matrix": (lambda tensors, name: tensors.update({name: torch.tensor(1.0)}), r"found torch.float32 \(\)"),
    "not finite": (lambda tensors, name: tensors[name].fill_(torch.nan), "some of its numbers are not finite"),
    "no weights": (lambda tensors, name: tensors.clear(), "there are no weights"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_weights_that_vllm_would_take_or_die_of_are_refused(
    wrong: str, driver: Driver, smollm2: Path, tmp_path: Path
) -> None:
    directory = write_adapter(tmp_path / "one", smollm2, TARGETS)
    tensors = load_file(directory / WEIGHTS)
    change, why = WRONG[wrong]
    change(tensors, next(iter(tensors)))
    save_file(tensors, directory / WEIGHTS)
    check_refused(driver, directory, why)


def test_a_damaged_file_and_a_scale_without_bound_are_refused(driver: Driver, smollm2: Path, tmp_path: Path) -> None:
    directory = write_adapter(tmp_path / "one", smollm2, TARGETS)
    config = json.loads((directory / CONFIG).read_bytes())
    (directory / CONFIG).write_text(json.dumps({**config, "lora_alpha": 1e300}))
    check_refused(driver, directory, "too large")
    (directory / CONFIG).write_text(json.dumps(config))
    (directory / WEIGHTS).write_bytes((directory / WEIGHTS).read_bytes()[:1000])
    check_refused(driver, directory, "header")


def check_refused(driver: Driver, directory: Path, why: str) -> None:
    with pytest.raises(InvalidAdapter, match=why):
        ask(driver, 1, adapter(directory))
    driver.live.discard(1)
    assert not driver.engine._requests  # type: ignore[attr-defined]


def test_requests_whose_adapter_changes_after_vllm_has_removed_it_fail_alone(
    driver: Driver, adapters: list[Adapter], smollm2: Path, tmp_path: Path
) -> None:
    """They wait, because a batch has two adapters, and memory three."""
    for number, lora in enumerate([None, *adapters]):
        ask(driver, number, lora)
    expected = texts(driver.run())
    own = adapter(write_adapter(tmp_path / "own", smollm2, TARGETS, seed=9))
    for number, lora in enumerate([None, *adapters[:2], own, *adapters[2:]]):
        ask(driver, number, lora)
    engine: Any = driver.engine
    begun = driver.step()
    assert engine._adapters.name_of(own).lora_int_id not in engine._llm.list_loras()
    write_adapter(tmp_path / "other", smollm2, TARGETS, seed=10)
    shutil.copy(tmp_path / "other" / WEIGHTS, tmp_path / "own" / WEIGHTS)
    outputs = driver.run()
    for output in begun:
        outputs[output.request_id].insert(0, output)
    [failure] = outputs.pop(3)
    assert isinstance(failure.error, InvalidAdapter)
    assert "have changed" in failure.error.message
    assert [text for _, text in sorted(texts(outputs).items())] == [text for _, text in sorted(expected.items())]
    assert not engine._llm.list_loras()


def test_such_a_request_fails_alone_also_when_few_adapters_are_left(
    driver: Driver, adapters: list[Adapter], smollm2: Path, tmp_path: Path
) -> None:
    """Memory has room for all that are left, and vLLM has not yet read the removed one again."""
    own = adapter(write_adapter(tmp_path / "own", smollm2, TARGETS, seed=9))
    for number, lora in enumerate([*adapters[:2], own, *adapters[2:]]):
        ask(driver, number, lora)
    engine: Any = driver.engine
    driver.step()
    for number in (3, 4):
        driver.abort(number)
    assert len(engine._adapters.loaded) == 3
    assert engine._adapters.name_of(own).lora_int_id not in engine._llm.list_loras()
    (tmp_path / "own" / WEIGHTS).unlink()
    outputs = driver.run()
    [failure] = outputs.pop(2)
    assert isinstance(failure.error, InvalidAdapter)
    assert all(texts(outputs).values())
    assert not engine._llm.list_loras()


def test_vllm_itself_loads_no_files_that_have_changed(
    driver: Driver, smollm2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They change after the engine has checked them, before vLLM reads them."""
    own = adapter(write_adapter(tmp_path / "own", smollm2, TARGETS, seed=9))
    other = write_adapter(tmp_path / "other", smollm2, TARGETS, seed=10)
    engine: Any = driver.engine
    add_lora = engine._llm.add_lora

    def change_and_add(request: Any) -> Any:
        shutil.copy(other / WEIGHTS, tmp_path / "own" / WEIGHTS)
        return add_lora(request)

    monkeypatch.setattr(engine._llm, "add_lora", change_and_add)
    with pytest.raises(InvalidAdapter, match="have changed"):
        ask(driver, 1, own)
    driver.live.clear()
    assert not engine._llm.list_loras()
