"""Every capability on the vllm engines, in real workers, as tests/api has it for the other engines."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from vllm.engine.protocol import EngineClient

from tests.api.document import OURS
from tests.support.capability_matrix import check_capabilities
from tests.support.capability_subjects import FAMILIES
from tests.support.shared_system import SharedSystem, open_shared_system


@pytest.fixture(scope="module", params=["vllm", "vllm_lora", "vllm_qwen3", "vllm_qwen2_5"])
def family(request: pytest.FixtureRequest, smollm2: Path) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def shared_system(
    family: str, fixture_processes: set[int], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SharedSystem]:
    opening = lambda: FAMILIES[family].open(tmp_path_factory.mktemp(family))  # noqa: E731
    with open_shared_system(opening, fixture_processes, clear_choices=True) as shared_system:
        yield shared_system


@pytest.mark.timeout(900)  # waking from level 2 loads a model
def test_each_capability_works_or_is_refused_as_documented(
    family: str, shared_system: SharedSystem, pytestconfig: pytest.Config
) -> None:
    check_capabilities(family, shared_system, pytestconfig)


def test_the_document_has_every_method_of_the_engine_client() -> None:
    documented = {name for theirs in OURS for name in re.findall(r"\w+", theirs)}
    theirs = {name for name in vars(EngineClient) if not name.startswith("_")} | {"model_config"}
    assert theirs - documented == set()
