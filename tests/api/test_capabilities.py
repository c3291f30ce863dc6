"""Every capability on every engine, in real workers: it works, or is refused with the reason that docs/api.md has."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from omni_actors.stages import assets
from tests.support.capability_matrix import check_capabilities
from tests.support.capability_subjects import FAMILIES
from tests.support.shared_system import SharedSystem, open_shared_system


@pytest.fixture(
    scope="module",
    params=[
        "echo",
        pytest.param("voice", marks=[pytest.mark.voice, pytest.mark.slow]),
        pytest.param("qwen3", marks=pytest.mark.slow),
        pytest.param("qwen2_5", marks=pytest.mark.exhaustive),
        pytest.param("qwen_image", marks=[pytest.mark.voice, pytest.mark.exhaustive]),
        pytest.param("diffusers", marks=[pytest.mark.voice, pytest.mark.slow]),
        pytest.param("bagel", marks=[pytest.mark.voice, pytest.mark.exhaustive]),
        pytest.param("bagel_in_one_stage", marks=[pytest.mark.voice, pytest.mark.slow]),
    ],
)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def shared_system(
    family: str, fixture_processes: set[int], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SharedSystem]:
    if family == "voice":
        for model in assets.NAMES:
            assets.prepare(model, print)
    opening = lambda: FAMILIES[family].open(tmp_path_factory.mktemp(family))  # noqa: E731
    with open_shared_system(opening, fixture_processes, clear_choices=family != "echo") as shared_system:
        yield shared_system


@pytest.mark.timeout(900)  # waking from level 2 loads a model
def test_each_capability_works_or_is_refused_as_documented(
    family: str, shared_system: SharedSystem, pytestconfig: pytest.Config
) -> None:
    check_capabilities(family, shared_system, pytestconfig)
