"""LoRA adapters of a thinker on vLLM: text and rows are those of the thinker on transformers.

It is Qwen2.5-Omni's: with adapters, vLLM's mixture of experts needs a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from omni_actors.stages.adapters.options import Adapter
from tests.support.adapters import adapter, write_adapter
from tests.support.closeness import assert_same_results
from tests.support.engine_driver import Driver, for_stages
from tests.support.omni_questions import tensor
from tiny_models import vllm as tiny


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory: Path = tiny.qwen2_5(tmp_path_factory.mktemp("qwen2_5"))
    return directory


@pytest.fixture(scope="module")
def drivers(open_stage: Callable[..., Any], model: Path) -> Iterator[tuple[Driver, Driver]]:
    lora = {"enable_lora": True, "max_loras": 1, "max_lora_rank": 8}
    with (
        closing(open_stage("qwen2_5_thinker", model)) as ours,
        closing(open_stage("vllm_qwen2_5_thinker", model, engine_args=lora)) as theirs,
    ):
        yield Driver(ours), Driver(theirs)


def answers(driver: Driver, loras: list[Adapter | None]) -> list[Any]:
    for number, lora in enumerate(loras):
        driver.start(number, max_tokens=6, ignore_eos=True, lora=lora and msgspec.to_builtins(lora))
        driver.feed(number, {"messages": [{"role": "user", "content": "tell me about the sea"}]}, last=True)
    outputs = driver.run()
    found = []
    for number in range(len(loras)):
        rows = [tensor(for_stages(each)["rows"]) for each in outputs[number] if "rows" in for_stages(each)]
        text = "".join(each.data.get("text", "") for each in outputs[number])
        found.append((text, [row.tolist() for each in rows for row in each]))
    return found


@pytest.mark.usefixtures("clear_choices")
def test_an_adapter_changes_text_and_rows_as_on_transformers(
    drivers: tuple[Driver, Driver], model: Path, tmp_path: Path
) -> None:
    lora = adapter(
        write_adapter(tmp_path / "one", model, ["self_attn.q_proj", "self_attn.o_proj"], part="thinker.model.")
    )
    ours, theirs = (answers(driver, [None, lora]) for driver in drivers)
    assert ours[0][0] != ours[1][0], "the adapter changes the text"
    assert [text for text, _ in theirs] == [text for text, _ in ours]
    for (_, found), (_, expected) in zip(theirs, ours, strict=True):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_same_results(one, [pytest.approx(value, abs=1e-3) for value in other])
