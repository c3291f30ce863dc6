"""Every capability on every engine, in real workers: it works, or it is refused with the reason that docs/api.md has.

`pytest tests/api --write-api` stores what was found, for the engines that this environment has.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio

from omni_actors import OmniSystem
from omni_actors.errors import Unsupported
from omni_actors.stages import assets
from tests.api.probes import CAPABILITIES
from tests.api.subjects import FAMILIES, Subject
from tests.support.shared_system import SharedSystem, open_shared_system

MATRIX = Path(__file__).with_name("matrix.json")
WATCHDOG_S = 120.0


@pytest.fixture(
    scope="module",
    params=[
        "echo",
        pytest.param("voice", marks=[pytest.mark.voice, pytest.mark.slow]),
        pytest.param("qwen3", marks=pytest.mark.slow),
        pytest.param("qwen2_5", marks=pytest.mark.slow),
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


async def found(subject: Subject) -> dict[str, str | None]:
    """Try every capability. None: it works; else why not."""
    outcomes: dict[str, str | None] = {}
    for capabilities in CAPABILITIES.values():
        for name, capability in capabilities.items():
            with trio.fail_after(WATCHDOG_S):
                try:
                    await capability.probe(subject)
                    outcomes[name] = None
                except Unsupported as error:
                    assert error.stage in subject.omni.pipeline.stages
                    outcomes[name] = error.why
    return outcomes


def test_each_capability_works_or_is_refused_as_documented(
    family: str, shared_system: SharedSystem, request: pytest.FixtureRequest
) -> None:
    outcomes: dict[str, dict[str, str | None]] = {}

    async def work(omni: OmniSystem) -> None:
        for subject in FAMILIES[family].subjects(omni):
            outcomes[subject.engine] = await found(subject)

    shared_system.run(work)
    documented = json.loads(MATRIX.read_text()) if MATRIX.exists() else {}
    if request.config.getoption("--write-api"):
        MATRIX.write_text(json.dumps({**documented, **outcomes}, indent=1, ensure_ascii=False) + "\n")
    else:
        assert outcomes == {engine: documented[engine] for engine in outcomes}
