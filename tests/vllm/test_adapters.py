"""LoRA adapters of the engines on vLLM, against the ``llm`` engine, whose adapters compute what PEFT's do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from omni_actors.errors import InvalidAdapter, InvalidRequest
from omni_actors.stages.adapters.options import Adapter
from omni_actors.stages.base import Decisions
from tests.support.adapters import adapter, write_adapter
from tests.support.engine_driver import Driver

TARGETS = ["q_proj", "v_proj", "o_proj", "down_proj"]
QUESTION = "Name three colours."


@pytest.fixture(scope="module")
def adapters(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Adapter]:
    folder = tmp_path_factory.mktemp("adapters")
    return [adapter(write_adapter(folder / name, smollm2, TARGETS, seed=seed), name) for seed, name in enumerate("abc")]


@pytest.fixture(scope="module")
def driver(open_stage: Callable[..., Any]) -> Iterator[Driver]:
    lora = {"enable_lora": True, "max_loras": 2, "max_cpu_loras": 2, "max_lora_rank": 8}
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
    """There are three adapters and two slots, so vLLM lets some requests wait and loads adapters again."""
    ours, asked = drive("llm"), [None, *adapters, *adapters[::-1], None]
    for each in (ours, driver):
        for number, lora in enumerate(asked):
            ask(each, number, lora)
    expected = texts(ours.run())
    assert len(set(expected.values())) == 4, "each adapter gives another answer"
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
    again = sum(outputs[-1].data["completion_tokens"] for outputs in whole.values()) - (5 + 6 + 7 + 8)
    assert engine.gauges()["generation_tokens"] - before == again


def test_adapters_are_kept_pinned_and_removed(driver: Driver, adapters: list[Adapter]) -> None:
    engine: Any = driver.engine
    assert engine.capabilities()["load_lora"] is None
    keep(driver, *adapters[:2], pinned=("a",))
    assert {*engine._adapters.loaded} == {*adapters[:2]}
    assert len(engine._llm.list_loras()) == 2
    with pytest.raises(InvalidRequest, match=r"2 pinned adapters leave no slot for others; engine_args.max_loras is 2"):
        keep(driver, *adapters, pinned=("a", "b"))
    ask(driver, 1, adapters[2])
    driver.step()
    keep(driver)
    assert {*engine._adapters.loaded} == {adapters[2]}
    driver.run()
    keep(driver)
    assert not engine._llm.list_loras()


def test_what_vllm_cannot_load_is_refused(
    driver: Driver, smollm2: Path, tmp_path: Path, adapters: list[Adapter]
) -> None:
    large = adapter(write_adapter(tmp_path / "large", smollm2, TARGETS, rank=16))
    for wrong, why in ((large, "rank 16"), (Adapter("a", adapters[0].directory, "0"), "have changed")):
        with pytest.raises(InvalidAdapter, match=why):
            ask(driver, 1, wrong)
    assert not driver.engine._requests  # type: ignore[attr-defined]
    driver.live.clear()
